"""The exceptions of KVarN, one per way in which things go wrong.

KvarnError                    everything below; `exit_code` is what the command line leaves with
├── UsageError                the caller asked for something that does not exist (exit code 2)
│   └── FormatError           an unknown preset, or a shape that the tile format cannot hold
├── ModelError                a model cannot be found, read or trusted
│   ├── ModelNotFoundError    no such path, hub id or built-in name
│   ├── CheckpointError       a weight is missing, short or unexpected
│   └── UnsupportedModelError a layer kind or option that this version does not compute rightly
├── SealError                 a tile cannot be quantized (non-finite, or beyond float16)
├── ContextOverflowError      the prompt does not fit the context
├── CapacityError             the memory does not suffice
├── RecordError               a record is damaged or foreign
├── ConstraintError           an answer cannot go on under its grammar
└── BackendError              a backend is missing or refused to start
"""

__all__ = [
    "BackendError",
    "CapacityError",
    "CheckpointError",
    "ConstraintError",
    "ContextOverflowError",
    "FormatError",
    "KvarnError",
    "ModelError",
    "ModelNotFoundError",
    "RecordError",
    "SealError",
    "UnsupportedModelError",
    "UsageError",
]


class KvarnError(Exception):
    """Base of every error that KVarN raises on purpose; its text is one line for the user."""

    exit_code = 1


class UsageError(KvarnError):
    """The caller asked for something that does not exist; the text lists what does."""

    exit_code = 2


class FormatError(UsageError):
    """An unknown preset, or a head_dim, tile length or bit width that the tile format cannot hold."""


class ModelError(KvarnError):
    """A model cannot be found, read or trusted."""


class ModelNotFoundError(ModelError):
    """No such path, hub id or built-in name."""


class CheckpointError(ModelError):
    """A tensor of the checkpoint is missing, short or unexpected."""


class UnsupportedModelError(ModelError):
    """The model has a layer kind or an option that would be computed wrongly."""


class SealError(KvarnError):
    """A tile cannot be quantized: non-finite input, or a constant beyond float16.

    `reason` is the text of a `kvarn.format.SealStatus`.
    """

    def __init__(self, reason: str, *, layer: int | None = None, kv_head: int | None = None) -> None:
        self.reason = reason
        self.layer = layer
        self.kv_head = kv_head
        where = "" if layer is None else f" in layer {layer}, kv head {kv_head}"
        super().__init__(f"cannot quantize a tile{where}: {reason}; use --kv-cache-dtype exact for this model")


class ContextOverflowError(KvarnError):
    """A prompt does not fit the context; the text holds both numbers."""

    def __init__(self, *, num_prompt_tokens: int, context: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.context = context
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room to answer in a context of {context}; "
            "shorten it or raise --ctx-size"
        )


class CapacityError(KvarnError):
    """The memory does not suffice; the text holds what is needed and what there is."""


class RecordError(KvarnError):
    """A record is damaged, foreign or of another shape."""


class ConstraintError(KvarnError):
    """An answer cannot go on under its grammar: a limit was reached, or no token is left to choose."""


class BackendError(KvarnError):
    """A backend is missing on this machine, or its start-up self-test refused."""
