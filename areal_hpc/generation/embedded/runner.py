"""The batch on the model: rows, prefill, decode, sampling and ends, vectorised over the rows. No policy, no threads.

    runner.admit(sequences)     compute their prompts, sample a first token each     -> those that finished
    runner.decode()             one token for every running sequence                 -> those that finished
    runner.remove(sequence)     its row is free; the last row moves into the gap

Rows are dense: sequence i of ``running`` owns row i of the cache and of every column. Python touches a token only to
append it to its sequence; everything else about it is one array operation for the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray

from areal_hpc.dialogue.text import first_stop
from areal_hpc.errors import GenerationError
from areal_hpc.generation.embedded.cache import KVCache
from areal_hpc.generation.embedded.model import Model
from areal_hpc.generation.embedded.sampler import Sampled, SamplingColumns, sample, uniforms
from areal_hpc.generation.embedded.sequence import Sequence
from areal_hpc.types import TokenLogprob
from areal_hpc.waits import advance

LOGIT_ROWS = 256
"""Prompt positions whose logits are in memory at once when prompt log-probs are asked for."""


class BatchRunner:
    """Owns the KV cache and the running sequences."""

    def __init__(self, model: Model, eos_token_ids: frozenset[int], max_running: int, max_tokens: int) -> None:
        self.model = model
        self.running: list[Sequence] = []
        self.num_tokens = 0  # sampled since the start
        self.max_running = max_running
        self._eos = eos_token_ids
        self._vocab_size = model.architecture.vocab_size
        self._cache = KVCache(model.architecture, model.dtype, max_running, max_tokens)
        self._donors: dict[tuple[int, ...], Sequence] = {}  # by what their rows begin with
        self._last_token = np.zeros(max_running, dtype=np.int64)
        self._length = np.zeros(max_running, dtype=np.int64)  # positions of the row that the cache holds
        self._generated = np.zeros(max_running, dtype=np.int64)
        self._budget = np.zeros(max_running, dtype=np.int64)
        self._minimum = np.zeros(max_running, dtype=np.int64)
        self._seed = np.zeros(max_running, dtype=np.uint64)
        self._temperature = np.ones(max_running, dtype=np.float32)
        self._top_k = np.zeros(max_running, dtype=np.int64)
        self._top_p = np.ones(max_running, dtype=np.float32)
        self._min_p = np.zeros(max_running, dtype=np.float32)
        self._stops = np.zeros((max_running, self._vocab_size), dtype=np.bool_)  # tokens that end each row
        self._columns = (
            self._last_token, self._length, self._generated, self._budget, self._minimum, self._seed,
            self._temperature, self._top_k, self._top_p, self._min_p, self._stops,
        )  # fmt: skip

    # -- rows

    def _add(self, sequence: Sequence) -> None:
        row, params = len(self.running), sequence.params
        sequence.row = row
        self.running.append(sequence)
        self._generated[row] = len(sequence.token_ids)
        self._budget[row] = params.max_new_tokens
        self._minimum[row] = params.min_new_tokens
        self._seed[row] = sequence.seed
        self._temperature[row] = params.temperature
        self._top_k[row] = self._vocab_size if params.top_k == -1 else min(params.top_k, self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._stops[row] = False
        self._stops[row, list(self._stop_ids(sequence))] = True

    def _stop_ids(self, sequence: Sequence) -> frozenset[int]:
        params = sequence.params
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos

    def remove(self, sequence: Sequence) -> None:
        """Free the row of ``sequence``; the last row's sequence, its columns and its cache move into the gap."""
        row, last = sequence.row, len(self.running) - 1
        moved = self.running.pop()
        if moved is not sequence:
            self._cache.copy(last, row, int(self._length[last]))
            for column in self._columns:
                column[row] = column[last]
            self.running[row] = moved
            moved.row = row
        sequence.row = -1
        if self._donors.get(sequence.prefix) is sequence:
            del self._donors[sequence.prefix]

    def forget_prefixes(self) -> None:
        """Rows computed so far may not be copied any more: the weights have changed."""
        self._donors.clear()

    # -- prefill

    @torch.inference_mode()
    def admit(self, sequences: Many[Sequence]) -> list[Sequence]:
        """Give each sequence a row and compute its history; those that finished with their first token.

        A sequence whose history another row begins with copies that row and joins the next decode step instead.
        """
        fresh: list[Sequence] = []
        copies: list[tuple[Sequence, Sequence]] = []
        for sequence in sequences:
            sequence.prefix = sequence.history
            donor = self._donors.get(sequence.prefix) if sequence.logprob_start is None else None
            self._add(sequence)
            if donor is None:
                fresh.append(sequence)
            else:
                copies.append((sequence, donor))
            self._donors[sequence.prefix] = sequence
        finished = self._prefill(fresh) if fresh else []
        for sequence, donor in copies:
            self._copy_prefix(sequence, donor)
        return finished

    def _copy_prefix(self, sequence: Sequence, donor: Sequence) -> None:
        sequence.num_cached = len(sequence.prefix) - 1
        self._cache.copy(donor.row, sequence.row, sequence.num_cached)
        self._length[sequence.row] = sequence.num_cached
        self._last_token[sequence.row] = sequence.prefix[-1]

    def _prefill(self, fresh: list[Sequence]) -> list[Sequence]:
        lengths = np.array([len(sequence.prefix) for sequence in fresh])
        tokens = np.zeros((len(fresh), lengths.max()), dtype=np.int64)
        for padded, sequence in zip(tokens, fresh, strict=True):
            padded[: len(sequence.prefix)] = sequence.prefix
        rows = np.array([sequence.row for sequence in fresh])
        hidden = self.model.prefill(torch.from_numpy(tokens), torch.from_numpy(rows), self._cache)
        self._length[rows] = lengths
        for index, sequence in enumerate(fresh):
            if sequence.logprob_start is not None and not sequence.input_logprobs:
                self._score_prompt(sequence, hidden[index])
        last = hidden[torch.arange(len(fresh)), torch.from_numpy(lengths) - 1]
        return self._advance(rows, self.model.logits(last))

    def _score_prompt(self, sequence: Sequence, hidden: torch.Tensor) -> None:
        """Log-probs at temperature 1 of the prompt's tokens after ``logprob_start``, each given those before it."""
        assert sequence.logprob_start is not None
        targets = torch.tensor(sequence.prompt)
        for start in range(sequence.logprob_start, len(sequence.prompt) - 1, LOGIT_ROWS):
            end = min(start + LOGIT_ROWS, len(sequence.prompt) - 1)
            distribution = torch.log_softmax(self.model.logits(hidden[start:end]), -1)
            chosen = distribution.gather(1, targets[start + 1 : end + 1, None])[:, 0]
            sequence.input_logprobs += chosen.tolist()
            if sequence.num_top:
                sequence.input_top_logprobs += _top(distribution, sequence.num_top)

    # -- decode

    @torch.inference_mode()
    def decode(self) -> list[Sequence]:
        """Sample one more token of every running sequence; those that finished with it."""
        num = len(self.running)
        token_ids, positions = torch.from_numpy(self._last_token[:num]), torch.from_numpy(self._length[:num])
        logits = self.model.logits(self.model.decode(token_ids, positions, self._cache))
        self._length[:num] += 1
        return self._advance(np.arange(num), logits)

    def _advance(self, rows: NDArray[np.int64], logits: torch.Tensor) -> list[Sequence]:
        """Sample from ``logits`` [b, V] of ``rows`` [b], append, and end what must end."""
        early = np.flatnonzero(self._generated[rows] < self._minimum[rows])
        if early.size:
            logits[early] = logits[early].masked_fill(torch.from_numpy(self._stops[rows[early]]), -torch.inf)
        sequences = [self.running[row] for row in rows]
        _hold_to_schemas(logits, sequences)
        sampled = sample(logits, self._sampling(rows), uniforms(self._seed[rows], self._generated[rows]))
        token_ids = sampled.token_ids.numpy()
        for sequence, token_id, logprob in zip(sequences, token_ids.tolist(), sampled.logprobs.tolist(), strict=True):
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            if sequence.matcher is not None and np.isfinite(logprob):
                sequence.matcher.take(token_id)
        self.num_tokens += len(sequences)
        advance("tokens generated", len(sequences))
        self._generated[rows] += 1
        self._last_token[rows] = token_ids
        self._add_top(sequences, sampled)
        stopped = self._stops[rows, token_ids]
        ended = stopped | (self._generated[rows] >= self._budget[rows]) | ~np.isfinite(sampled.logprobs.numpy())
        ended |= np.array([self._watch(sequence) for sequence in sequences])
        finished = [sequences[index] for index in np.flatnonzero(ended)]
        for sequence in finished:
            self._end(sequence)
        return finished

    def _sampling(self, rows: NDArray[np.int64]) -> SamplingColumns:
        return SamplingColumns(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
        )

    def _add_top(self, sequences: list[Sequence], sampled: Sampled) -> None:
        asking = [index for index, sequence in enumerate(sequences) if sequence.num_top]
        if not asking:
            return
        widest = max(sequences[index].num_top for index in asking)
        for index, top in zip(asking, _top(sampled.distribution[asking], widest), strict=True):
            sequences[index].top_logprobs.append(top[: sequences[index].num_top])

    def _watch(self, sequence: Sequence) -> bool:
        """Whether the newest token completes a stop string."""
        if sequence.tracker is None:
            return False
        text = sequence.tracker.extend(sequence.token_ids[-1:])
        hit = first_stop(text, sequence.params.stop, sequence.searched)
        sequence.searched = len(text)
        if hit is None or len(sequence.token_ids) < sequence.params.min_new_tokens:
            return False
        sequence.finish("stop", matched=hit[1])
        return True

    def _end(self, sequence: Sequence) -> None:
        """Say why ``sequence`` ended; a token that is an end and uses up the budget is an end."""
        token_id = sequence.token_ids[-1]
        if not np.isfinite(sequence.logprobs[-1]):
            self._cache.clear(sequence.row)
            message = f"request {sequence.request_id}: logits are not finite; the weights are damaged, reload them"
            sequence.resolve(GenerationError(message))
            sequence.finish("abort", message=message)
        elif self._stops[sequence.row, token_id]:
            sequence.finish("stop", matched=token_id)
        elif sequence.finish_reason is None:
            sequence.finish("length", length=sequence.params.max_new_tokens)


def _hold_to_schemas(logits: torch.Tensor, sequences: Many[Sequence]) -> None:
    """Leave of ``logits`` [b, V] what the schemas of their ``sequences`` [b] allow, before anything else is judged."""
    for row, sequence in enumerate(sequences):
        if sequence.matcher is not None:
            logits[row].masked_fill_(torch.from_numpy(~sequence.matcher.allowed()), -torch.inf)


def _top(distribution: torch.Tensor, num: int) -> list[list[TokenLogprob]]:
    """The ``num`` likeliest tokens of each row, likeliest first; a token that was cut off has no log-prob to tell."""
    values, token_ids = distribution.topk(min(num, distribution.shape[1]), -1)
    return [
        [(value, token_id) for value, token_id in zip(*row, strict=True) if value > -np.inf]
        for row in zip(values.tolist(), token_ids.tolist(), strict=True)
    ]
