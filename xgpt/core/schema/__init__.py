"""Define the types that are stored in files. Every package may import this one."""

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.caches import BYTES_PER_ELEMENT, SCALE_BYTES, Cache, caches_of
from xgpt.core.schema.cluster import ClusterSpec, DeviceKind, Efficiency, Link
from xgpt.core.schema.constraint import Admission, AdmissionOrder, Constraint, Goal, KvPromise, Objective, SearchMethod
from xgpt.core.schema.engine import EngineSpec
from xgpt.core.schema.estimate import (
    Capacity,
    Ceiling,
    Estimate,
    JointLengths,
    MixingEdge,
    ReuseEstimate,
    SearchCertificate,
    SearchEffort,
    StepTimes,
)
from xgpt.core.schema.model import HEAD, DType, ModelShape, ModelSpec, Precision, RunDType, StoredDType
from xgpt.core.schema.model_blocks import Attention, Block, Indexer, Recurrent
from xgpt.core.schema.model_parts import (
    Experts,
    LatentAttention,
    LinearRope,
    LongRope,
    Part,
    Quantization,
    RopeScaling,
    Tower,
    YarnRope,
)
from xgpt.core.schema.plan import SLICE_TOKENS, Batching, EngineKind, Plan, PlanDraft, ProfileRef, Stage
from xgpt.core.schema.policy import (
    ChunkedSettings,
    OrcaSettings,
    Pinned,
    PolicySettings,
    RraSettings,
    SingleLaneSettings,
    SlackBudget,
    StageLane,
    StaticSettings,
    TensorParallel,
    Variable,
    WaaSettings,
)
from xgpt.core.schema.profile import (
    LEAST_HEADROOM,
    PACES_AT_REST,
    RESTLESS,
    SERVED,
    CrossTimes,
    Curve,
    EncoderLayerTimes,
    FittedLoads,
    Jitter,
    LayerTimes,
    Profile,
    Surface,
)
from xgpt.core.schema.recommendation import Offer, Ranged, Recommendation
from xgpt.core.schema.replan import Decision, FailedJudgement, Observation, ObservedReuse, Outcome, Planner, Proposal
from xgpt.core.schema.report import BenchReport, Calibration, Comparison, CoreWaits, UrlReport
from xgpt.core.schema.speculation import Speculation, SpeculativeMethod
from xgpt.core.schema.step_log import ANYONE, Account, Arrival, LaneName, StepRecord
from xgpt.core.schema.workload import (
    Constant,
    Histogram,
    RequestClass,
    TruncatedNormal,
    Uniform,
    Workload,
    WorkloadSpec,
)
