"""The compact layout: how many devices each side of a run takes and how it splits a model over them, in one word.

    layout      allocation "+" allocation                  one engine, one trainer, in either order
    allocation  backend ":" sizes                          sglang:d4t2
              | backend ":(attn:" sizes "|ffn:" sizes ")"  experts of a mixture split otherwise than attention
    sizes       (letter number)...                         d data, t tensor, p pipeline, c context, e expert

An engine's data parallelism is its number of replicas. In the `ffn` part t is the tensor parallelism of each expert;
what it leaves out is taken from attention (p) or is 1 (t, e), and data parallelism fills the devices that are left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.config.schema import EngineName, TrainerBackendName
from areal_hpc.errors import ConfigError

MEANINGS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}

ENGINES = {
    EngineName.SGLANG.value: "dtp",
    EngineName.VLLM.value: "dtp",
    EngineName.EMBEDDED.value: "d",
}
TRAINERS = {
    TrainerBackendName.MEGATRON.value: "dtpce",
    TrainerBackendName.REFERENCE.value: "d",
    "fsdp": "dtc",
}
"""Backend name to the letters it takes. `fsdp` is what others write for sharded plain torch; see ``settings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One backend and its parallel sizes; ``dp * tp * pp * cp`` devices in all."""

    backend: str
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int  # ranks that share the experts
    etp: int  # ranks that share each expert's matrices
    edp: int  # copies of each expert; dp for a model without expert parallelism

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The two sides of a run."""

    engine: Allocation
    trainer: Allocation


def parse_layout(text: str) -> Layout:
    """A whole layout such as `sglang:d4t2+megatron:d2p2t2`.

    Raises:
        ConfigError: not one engine and one trainer, or as ``parse_allocation``.
    """
    sides = [parse_allocation(part) for part in text.split("+")]
    engines = [side for side in sides if side.backend in ENGINES]
    trainers = [side for side in sides if side.backend in TRAINERS]
    if len(engines) != 1 or len(trainers) != 1:
        raise ConfigError(
            f"{text!r} names {len(engines)} engines and {len(trainers)} trainers; write one of each, "
            "such as sglang:d4t2+megatron:d2p2t2"
        )
    return Layout(engine=engines[0], trainer=trainers[0])


def parse_allocation(text: str) -> Allocation:
    """One side of a layout, such as `megatron:d2p2t2`.

    Raises:
        ConfigError: no or an unknown backend, a size that the backend does not take, sizes that do not fit each other.
    """
    backend, colon, sizes = text.partition(":")
    if "+" in text or not colon or backend not in ENGINES | TRAINERS:
        names = ", ".join([*ENGINES, *TRAINERS])
        raise ConfigError(f"allocation {text!r}: write backend:sizes, such as sglang:d4t2; backends are {names}")
    letters = (ENGINES | TRAINERS)[backend]
    if not sizes.startswith("("):
        return _uniform(backend, _sizes(sizes, letters, text), text)
    hybrid = re.fullmatch(r"\(attn:(?P<attn>[^|]*)\|ffn:(?P<ffn>[^|]*)\)", sizes)
    if hybrid is None or "e" not in letters:
        raise ConfigError(
            f"allocation {text!r}: parentheses are for experts under megatron; write them as "
            "megatron:(attn:d4p2t2|ffn:d4p2t1e2)"
        )
    return _hybrid(backend, _sizes(hybrid["attn"], "dtpc", text), _sizes(hybrid["ffn"], "dtpe", text), text)


def _sizes(part: str, letters: str, text: str) -> Mapping[str, int]:
    """`d4t2` as {d: 4, t: 2}: each letter at most once, each number at least 1."""
    pairs = re.findall(r"([a-z])([1-9][0-9]{0,5})", part)
    if not part or "".join(letter + number for letter, number in pairs) != part:
        raise ConfigError(f"allocation {text!r}: {part!r} is no row of letter and positive number, such as d4t2")
    sizes = {letter: int(number) for letter, number in pairs}
    if len(sizes) < len(pairs):
        raise ConfigError(f"allocation {text!r}: {part!r} names a letter twice; keep one")
    if extra := sorted(sizes.keys() - set(letters)):
        taken = ", ".join(f"{letter} ({MEANINGS[letter]})" for letter in letters)
        raise ConfigError(f"allocation {text!r}: {part!r} has {', '.join(extra)}; this backend takes only {taken}")
    return sizes


def _uniform(backend: str, sizes: Mapping[str, int], text: str) -> Allocation:
    d, t, p, c, e = (sizes.get(letter, 1) for letter in "dtpce")
    edp = d if e == 1 else _expert_copies(d * t * p * c, p * e, text)
    return Allocation(backend=backend, dp=d, tp=t, pp=p, cp=c, ep=e, etp=1, edp=edp)


def _hybrid(backend: str, attn: Mapping[str, int], ffn: Mapping[str, int], text: str) -> Allocation:
    d, t, p, c = (attn.get(letter, 1) for letter in "dtpc")
    etp, ep = ffn.get("t", 1), ffn.get("e", 1)
    if ffn.get("p", p) != p:
        raise ConfigError(f"allocation {text!r}: ffn has p{ffn['p']}, attn p{p}; a stage holds both, write the same p")
    edp = _expert_copies(d * t * p * c, p * etp * ep, text)
    if ffn.get("d", edp) != edp:
        raise ConfigError(
            f"allocation {text!r}: ffn has d{ffn['d']}, but the {d * t * p * c} devices of attn leave d{edp}; "
            "write that, or leave d out"
        )
    return Allocation(backend=backend, dp=d, tp=t, pp=p, cp=c, ep=ep, etp=etp, edp=edp)


def _expert_copies(world_size: int, expert_ranks: int, text: str) -> int:
    if world_size % expert_ranks:
        raise ConfigError(
            f"allocation {text!r}: one copy of the experts takes {expert_ranks} ranks, which do not divide "
            f"{world_size} devices; change p, e or t"
        )
    return world_size // expert_ranks


def settings(layout: Layout) -> Mapping[str, Any]:
    """What a layout says about the sections `generation` and `trainer`, by dotted key.

    Raises:
        ConfigError: `fsdp` with more than data parallelism, which plain torch does not do here.
    """
    engine, trainer = layout.engine, layout.trainer
    return {
        "generation.backend": EngineName(engine.backend),
        "generation.replicas": engine.dp,
        "generation.tensor_parallel": engine.tp,
        "generation.pipeline_parallel": engine.pp,
        "trainer.backend": _trainer_backend(trainer),
        "trainer.ranks": trainer.world_size,
        "trainer.parallel.tensor": trainer.tp,
        "trainer.parallel.pipeline": trainer.pp,
        "trainer.parallel.context": trainer.cp,
        "trainer.parallel.expert": trainer.ep,
        "trainer.parallel.expert_tensor": trainer.etp,
    }


def _trainer_backend(trainer: Allocation) -> TrainerBackendName:
    if trainer.backend != "fsdp":
        return TrainerBackendName(trainer.backend)
    if trainer.world_size != trainer.dp:
        raise ConfigError(
            f"fsdp is run by the reference backend, which is data-parallel only; "
            f"write fsdp:d{trainer.world_size}, or use megatron for tensor and context parallelism"
        )
    return TrainerBackendName.REFERENCE
