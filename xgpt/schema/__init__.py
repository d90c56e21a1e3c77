"""The types that reach a file. Everyone may import this package; it imports nothing of the others."""

from xgpt.schema.base import Frozen
from xgpt.schema.cluster import ClusterSpec, DeviceKind, Efficiency, Link
from xgpt.schema.model import BYTES_PER_ELEMENT, DType, ModelSpec, RopeScaling, RunDType
from xgpt.schema.plan import (
    SLICE_TOKENS,
    Admission,
    AdmissionOrder,
    Constraint,
    Estimate,
    KvPromise,
    Plan,
    ProfileRef,
    SearchCertificate,
    Stage,
)
from xgpt.schema.policy import (
    ChunkedSettings,
    OrcaSettings,
    PolicySettings,
    RraSettings,
    SingleLaneSettings,
    StaticSettings,
    TensorParallel,
    Variable,
    WaaSettings,
)
from xgpt.schema.profile import CrossTimes, Curve, EncoderLayerTimes, LayerTimes, Profile, Surface
from xgpt.schema.replan import Decision, Observation, Outcome, Planner, Proposal
from xgpt.schema.report import BenchReport, Comparison, UrlReport
from xgpt.schema.step_log import Arrival, Lane, StepRecord
from xgpt.schema.workload import Constant, Histogram, TruncatedNormal, Uniform, Workload, WorkloadSpec

__all__ = [
    "BYTES_PER_ELEMENT",
    "SLICE_TOKENS",
    "Admission",
    "AdmissionOrder",
    "Arrival",
    "BenchReport",
    "ChunkedSettings",
    "ClusterSpec",
    "Comparison",
    "Constant",
    "Constraint",
    "CrossTimes",
    "Curve",
    "DType",
    "Decision",
    "DeviceKind",
    "Efficiency",
    "EncoderLayerTimes",
    "Estimate",
    "Frozen",
    "Histogram",
    "KvPromise",
    "Lane",
    "LayerTimes",
    "Link",
    "ModelSpec",
    "Observation",
    "OrcaSettings",
    "Outcome",
    "Plan",
    "Planner",
    "PolicySettings",
    "Profile",
    "ProfileRef",
    "Proposal",
    "RopeScaling",
    "RraSettings",
    "RunDType",
    "SearchCertificate",
    "SingleLaneSettings",
    "Stage",
    "StaticSettings",
    "StepRecord",
    "Surface",
    "TensorParallel",
    "TruncatedNormal",
    "Uniform",
    "UrlReport",
    "Variable",
    "WaaSettings",
    "Workload",
    "WorkloadSpec",
]
