"""An unfinished row taken out of one engine, so that another can go on with it. Plain data: no torch.

Keys and values stay behind: the next engine computes them anew from prompt and tokens. The random stream needs no
state either: its position is the number of tokens (`random_stream`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True, slots=True)
class ExportedRow:
    """A request and what was generated for it so far; a row that has not begun brings no tokens.

    `token_logprobs` has one number per token when the request asks for log-probabilities, else none.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()

    def problems(self) -> list[str]:
        """What is wrong with the row as a whole, beside its request: empty unless somebody invented it."""
        sampling = self.request.sampling
        num_logprobs = len(self.token_ids) if sampling.logprobs else 0
        checks = [
            (
                len(self.token_ids) < sampling.max_tokens,
                f"the row brings {len(self.token_ids)} tokens, max_tokens={sampling.max_tokens}: it is finished",
            ),
            (
                len(self.token_logprobs) == num_logprobs,
                f"the row brings {len(self.token_logprobs)} log-probabilities, expected {num_logprobs}",
            ),
        ]
        return [message for holds, message in checks if not holds]
