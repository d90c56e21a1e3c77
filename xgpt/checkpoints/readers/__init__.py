"""Make the fields of `ModelSpec` from the config.json of a family."""

from xgpt.checkpoints.readers.common import common
from xgpt.checkpoints.readers.dense import read
