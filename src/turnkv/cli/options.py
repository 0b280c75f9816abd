"""Options that the commands share, and the engine that they make."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from turnkv.engine import Engine


class Dtype(StrEnum):
    """Number format of weights and exact KV."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Weights(StrEnum):
    """What becomes of the model's weights."""

    EXACT = "exact"
    INT8 = "int8"


class Mode(StrEnum):
    """What a replay does with the recorded replies."""

    SCORE = "score"
    GENERATE = "generate"


_PANEL = "Model and cache"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="M",
        help="A folder, a .gguf file or a hub name.",
        show_default="SmolLM2-135M-Instruct",
        rich_help_panel=_PANEL,
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", metavar="P", help="A preset (see `turnkv policies`) or a TOML file.", rich_help_panel=_PANEL
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of weights and exact KV.", rich_help_panel=_PANEL)]
WeightsOption = Annotated[
    Weights,
    typer.Option("--weights", help="int8 halves what a token reads of them, at a small loss.", rich_help_panel=_PANEL),
]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget", metavar="SIZE", help="KV bytes of all sessions together, at most.", rich_help_panel=_PANEL
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="CPU threads that compute.",
        show_default="torch's own choice",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The shared options as given."""

    model: str | None
    policy: str
    dtype: Dtype
    weights: Weights = Weights.EXACT
    budget: str
    threads: int | None
    is_dry: bool = False

    def load_engine(self, say: Callable[[str], None]) -> "Engine":
        """Check the options, then load the model; `say` gets a line for each step of work.

        Raises:
            TurnKVError: an option cannot be followed, or the model cannot be loaded.
        """
        from turnkv.policy import load_policy, parse_size  # noqa: PLC0415 (`--help` needs none of it)

        policy, budget_bytes = load_policy(self.policy), parse_size("--budget", self.budget)

        import torch  # noqa: PLC0415 (takes seconds)

        from turnkv.config import CacheConfig, EngineConfig  # noqa: PLC0415 (likewise)
        from turnkv.engine import Engine  # noqa: PLC0415 (likewise)

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        cache = CacheConfig(budget_bytes=budget_bytes)
        if not self.is_dry:
            say(f"loading {self.model or 'SmolLM2-135M-Instruct'} in {self.dtype}")
        return Engine.load(
            self.model,
            policy=policy,
            dtype=self.dtype,
            cache=cache,
            config=EngineConfig(weights=self.weights),
            is_dry=self.is_dry,
            progress=say,
        )
