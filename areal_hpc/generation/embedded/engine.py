"""The CPU engine as one object: model, tokenizer, scheduler thread, weight updates."""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Sequence as Many
from pathlib import Path

from areal_hpc.buckets import dtype_named
from areal_hpc.config.lora import NO_LORA, LoraConfig
from areal_hpc.dialogue.grammar import Matcher
from areal_hpc.dialogue.text import IncrementalText, load_text
from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.model import load_model
from areal_hpc.generation.embedded.runner import BatchRunner
from areal_hpc.generation.embedded.scheduler import Scheduler
from areal_hpc.generation.embedded.sequence import Sequence, sample_seed
from areal_hpc.generation.embedded.updates import WeightUpdates
from areal_hpc.generation.served.request import SamplingParams


class EmbeddedEngine:
    """A continuous-batching engine for one dense model on the CPU.

        engine = EmbeddedEngine("models/tiny", dtype="float32", max_running=64, max_tokens=4096, threads=1, seed=7)
        engine.start()
        ...                       serve it (server.py), or engine.sequence(...) and engine.scheduler.call(...)
        engine.close()

    Args:
        model_path: Hugging Face checkpoint directory; without a tokenizer the engine speaks token ids only.
        dtype: ``float32`` or ``bfloat16``.
        max_running: sequences decoded at once; more wait.
        max_tokens: longest sequence, prompt and answer together.
        threads: CPU threads of the forward pass.
        seed: seeds requests that bring no seed of their own. Each replica needs another one; None draws one from the
            operating system.
        version: what the weights are called until an update names them.
        lora: adapters that updates bring, in place of the model's weights.
        update_timeout_s: limit of joining a weight group and of each broadcast in it.

    Raises:
        DataError: the directory does not hold a model that this engine computes, or a shorter context.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        max_running: int = 64,
        max_tokens: int = 4096,
        threads: int = 1,
        seed: int | None = None,
        version: str = "default",
        lora: LoraConfig = NO_LORA,
        update_timeout_s: float = 120.0,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise DataError(f"the embedded engine computes in float32 or bfloat16, not {dtype!r}; change model.dtype")
        self.model_path = Path(model_path)
        self.max_running, self.max_tokens, self.dtype = max_running, max_tokens, dtype
        self.model = load_model(self.model_path, dtype_named(dtype), max_tokens, lora)
        self.text = load_text(self.model_path)
        architecture = self.model.architecture
        ends = sorted(architecture.eos_token_ids)
        self.grammars = None if self.text is None else self.text.grammars(ends, architecture.vocab_size)
        if max_tokens > architecture.max_positions:
            raise DataError(
                f"max_tokens {max_tokens} exceeds the {architecture.max_positions} positions of {model_path}; "
                "lower model.max_tokens"
            )
        runner = BatchRunner(self.model, architecture.eos_token_ids, max_running, max_tokens)
        self.scheduler = Scheduler(runner, threads=threads, version=version)
        self.updates = WeightUpdates(self.model, self.scheduler, timeout_s=update_timeout_s)
        self._seeds = random.Random(secrets.randbits(64) if seed is None else seed)

    def start(self) -> None:
        self.scheduler.start()

    def close(self) -> None:
        """End the thread and leave all weight groups; unfinished sequences are aborted with the tokens they have."""
        self.scheduler.close()
        self.updates.close()

    def sequences(
        self,
        prompt: Many[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        logprob_start: int | None = None,
        num_top: int = 0,
        priority: int = 0,
    ) -> list[Sequence]:
        """``params.n`` new sequences for one prompt, checked but not submitted.

        Raises:
            DataError: an empty prompt, ids outside the vocabulary, more tokens than the context holds, stop strings
                or a grammar without a tokenizer, a grammar that cannot be forced. Nothing is ever truncated.
            ConfigError: the package that forces grammars is not installed.
        """
        self._check(prompt, params, logprob_start)
        parent = request_id or uuid.uuid4().hex
        seed = self._seeds.getrandbits(64) if params.sampling_seed is None else params.sampling_seed
        return [
            Sequence(
                request_id=parent if params.n == 1 else f"{parent}_{index}",
                parent_id=parent,
                prompt=tuple(prompt),
                params=params,
                seed=sample_seed(seed, index),
                version=self.scheduler.version,
                logprob_start=logprob_start,
                num_top=num_top,
                priority=priority,
                tracker=IncrementalText(self.text.decode) if params.stop and self.text else None,
                matcher=self._matcher(params),
            )
            for index in range(params.n)
        ]

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if self.grammars is None or not (params.json_schema or params.structural_tag):
            return None
        return self.grammars.matcher(schema=params.json_schema, structural_tag=params.structural_tag)

    def _check(self, prompt: Many[int], params: SamplingParams, logprob_start: int | None) -> None:
        vocab_size = self.model.architecture.vocab_size
        if not prompt:
            raise DataError("the prompt is empty; send at least one token")
        if not all(0 <= token_id < vocab_size for token_id in (*prompt, *params.stop_token_ids)):
            raise DataError(f"token ids must be in [0, {vocab_size})")
        if len(prompt) + params.max_new_tokens > self.max_tokens:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens {params.max_new_tokens} exceed the context of "
                f"{self.max_tokens} tokens; nothing is truncated, so send less or ask for less"
            )
        if logprob_start is not None and not 0 <= logprob_start < len(prompt):
            raise DataError(f"logprob_start_len must be -1 or in [0, {len(prompt)})")
        if params.stop and self.text is None:
            raise DataError(f"stop strings need a tokenizer, and {self.model_path} has none")
        if (params.json_schema or params.structural_tag) and self.grammars is None:
            raise DataError(f"a grammar needs a tokenizer, and {self.model_path} has none")
