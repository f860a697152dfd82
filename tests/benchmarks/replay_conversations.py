"""Random multi-turn conversations through transcripts: is exactly what was sampled trained?

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/replay_conversations.py [NUM]

Every template family plays its share of NUM conversations. Written beside this script: how many requests were of each
drift, and how many conversations differ from what the engine saw and sampled (which must be none).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from dialogues import FAMILIES, make_dialogue
from machine import describe
from replayed import Conversation


def main(num: int) -> int:
    result: dict[str, object] = {"machine": describe(), "conversations": num}
    mismatched = 0
    print("family        talks   turns  start  clean realign   fork mismatches")
    for family in FAMILIES:
        drifts: Counter[str] = Counter()
        wrong = 0
        with tempfile.TemporaryDirectory() as directory:
            dialogue = make_dialogue(Path(directory), family)
            for seed in range(num // len(FAMILIES)):
                conversation = Conversation(dialogue, random.Random(f"benchmark/{family}/{seed}"))
                conversation.play()
                wrong += bool(conversation.mismatches())
                drifts += conversation.transcript.drifts
        row = {name: drifts[name] for name in ("start", "clean", "realign", "fork")}
        result[family] = {**row, "mismatches": wrong}
        mismatched += wrong
        counts = " ".join(f"{row[name]:>{width}}" for name, width in zip(row, (6, 6, 7, 6), strict=True))
        print(f"{family:12} {num // len(FAMILIES):>6} {sum(row.values()):>7} {counts} {wrong:>10}", flush=True)
    result["mismatches"] = mismatched
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(mismatched > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
