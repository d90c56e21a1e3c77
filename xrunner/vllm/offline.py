"""Run groups of requests on vLLM's offline interface: `python -m xrunner.vllm.offline JOB.json`.

JOB.json holds `engine`, the keyword arguments of vllm.LLM, and `groups`. A group starts together and ends before the
next one begins. A group states the largest number of tokens of each step (null: vLLM's own budget) and its requests,
each as [prompt tokens, output tokens, whether its K/V are cached]. The executed steps are in the step log of the
engine's scheduler. Standard output has a line for each group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DONE = "group done"


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    for step_tokens, group in job["groups"]:
        llm.sleep(level=0, mode="keep")  # no request starts before all have been submitted
        llm.enqueue(
            [{"prompt_token_ids": [1 + i % 7] * length} for i, (length, _, _) in enumerate(group)],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=output,
                    ignore_eos=True,
                    detokenize=False,
                    skip_reading_prefix_cache=not at_hand,
                    extra_args=None if step_tokens is None else {"step_tokens": step_tokens},
                )
                for _, output, at_hand in group
            ],
            use_tqdm=False,
        )
        llm.wake_up(tags=["scheduling"])
        llm.wait_for_completion(use_tqdm=False)
        print(DONE, flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
