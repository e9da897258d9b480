"""The public names of hvdlite, and where each is from: `__init__` reads this file and ``shared_names.pyi``."""

from .balanced_batches import BalancedBatchSampler as BalancedBatchSampler
from .buckets.exchange import (
    Exchange as Exchange,
    ExchangeWork as ExchangeWork,
    Gradients as Gradients,
    Links as Links,
)
from .buckets.settings import DiLoCo as DiLoCo, LocalSGD as LocalSGD
from .comm.reduce_op import ReduceOp as ReduceOp
from .compression.casts import Compression as Compression, Compressor as Compressor
from .compression.codecs import Codec as Codec
from .calls.handle import Handle as Handle
from .errors import (
    CommunicationError as CommunicationError,
    GradientError as GradientError,
    HvdliteError as HvdliteError,
    LaunchEnvironmentError as LaunchEnvironmentError,
    MismatchError as MismatchError,
    NotInitializedError as NotInitializedError,
    PeerLostError as PeerLostError,
)
from .job_log import JobLog as JobLog, log_to as log_to
from .optim.checkpoint import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from .runtime.functions import RankPace as RankPace, stragglers as stragglers
from .runtime.world import init as init, is_homogeneous as is_homogeneous
from .shared_names import *
from .signal_saver import save_on_signal as save_on_signal

__version__: str
