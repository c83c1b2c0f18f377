"""The answers to requests that an engine served: complete, or in parts as server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.servers.serve import text
from pytest_kvmock.servers.serve.api import Answer, Usage, to_json

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.api import Generate

DONE: Final = b"data: [DONE]\n\n"
_UNFINISHED: Final[dict[str, Any]] = {"logprobs": None, "finish_reason": None}
_NOTHING: Final[dict[str, Any]] = {}


class CompletionChoice:
    """One choice of an answer.

    Attributes:
        index: its position in the answer.
        tokens: the tokens generated so far.
        sent: the number of tokens that were sent to the client, if the answer comes in parts.
        usage: its usage.
        finish_reason: why it ended; None if it has not ended.
        hand_over: at a prefill engine of a vLLM P/D pair, the parameters for the decode engine; None: nothing.
    """

    __slots__ = ("finish_reason", "hand_over", "index", "sent", "tokens", "usage")

    def __init__(self, index: int, prompt_tokens: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.sent = 0
        self.usage = Usage(prompt_tokens)
        self.finish_reason: str | None = None
        self.hand_over: dict[str, Any] | None = None


class Encoder:
    """Writes the answer to one request.

    Args:
        asked: the request.
        model: the name of the model, for a request that names no model.
        created: the time of creation, in seconds of an epoch.
        hands_over: whether the engine is in a P/D pair of vLLM, so that answers have `kv_transfer_params`.
    """

    def __init__(self, asked: Generate, model: str, created: int, *, hands_over: bool = False) -> None:
        self._asked, self._hands_over = asked, hands_over
        self._kind = "text_completion" if asked.api == "completions" else "chat.completion"
        self._head: dict[str, Any] = {
            "id": asked.id,
            "object": self._kind,
            "created": created,
            "model": asked.model or model,
        }
        chunk = self._head | {"object": "text_completion" if asked.api == "completions" else "chat.completion.chunk"}
        self._chunk_head = chunk
        # A chunk of letters needs no escapes, so the JSON around them is made only once for each choice.
        self._around: dict[int, tuple[bytes, bytes]] = {}

    # ------------------------------------------------------------------------------------------------------- parts

    def begin(self, choice: CompletionChoice) -> bytes:
        """Return the part before the first token of a choice: the role of a chat."""
        if self._asked.api != "chat":
            return b""
        role = {"index": choice.index, "delta": {"role": "assistant", "content": ""}} | _UNFINISHED
        tokens = {"prompt_token_ids": self._prompt(choice)} if self._asked.return_token_ids else {}
        return self._event(role, tokens | self._used(choice, 0))

    def tokens(self, choice: CompletionChoice, new: list[int]) -> bytes:
        """Return a part with new tokens, which the choice already has; the last part has the reason of the end."""
        asked = self._asked
        if asked.api == "generate":
            return self._sse(self._generated(choice))
        is_last = choice.finish_reason is not None and choice.sent == len(choice.tokens)
        is_first = choice.sent == len(new)
        if is_last or (is_first and asked.echo) or asked.continuous_usage or asked.return_token_ids:
            content = text.decode(new)
            if is_first and asked.echo and asked.api == "completions":
                content = text.decode(self._prompt(choice)) + content
            row = {"index": choice.index} | self._content(content) | _UNFINISHED
            if is_last:
                row |= {"finish_reason": choice.finish_reason, "stop_reason": None}
            if asked.return_token_ids:
                row |= self._token_ids(choice, new) if is_first else {"token_ids": new}
            more = self._used(choice, choice.sent)
            if is_last and choice.hand_over is not None:
                more = more | {"kv_transfer_params": choice.hand_over}
            return self._event(row, more)
        around = self._around.get(choice.index)
        if around is None:
            mark = "\N{INVISIBLE SEPARATOR}"
            part = self._event({"index": choice.index} | self._content(mark) | _UNFINISHED)
            before, _, after = part.partition(mark.encode())
            around = self._around[choice.index] = before, after
        if all(97 <= token <= 122 for token in new):
            return around[0] + bytes(new) + around[1]
        return around[0] + to_json(text.decode(new))[1:-1] + around[1]

    def _prompt(self, choice: CompletionChoice) -> tuple[int, ...]:
        return self._asked.prompts[choice.index // self._asked.n]

    def _token_ids(self, choice: CompletionChoice, tokens: list[int]) -> dict[str, Any]:
        """Return the tokens of a choice. A completion also has those of its prompt; a chat has them next to its
        choices.
        """
        prompt = {"prompt_token_ids": self._prompt(choice)} if self._asked.api == "completions" else {}
        return prompt | {"token_ids": tokens}

    def _used(self, choice: CompletionChoice, count: int) -> dict[str, Any]:
        """Return the usage of a choice so far, for a part."""
        if not self._asked.continuous_usage:
            return {}
        prompt = len(self._prompt(choice))
        return {"usage": {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}}

    def _content(self, content: str) -> dict[str, Any]:
        return {"text": content} if self._asked.api == "completions" else {"delta": {"content": content}}

    def done(self, usage: Usage) -> bytes:
        """Return the end of an answer in parts."""
        if self._asked.include_usage:
            return self._sse(self._chunk_head | {"choices": [], "usage": usage.to_json()}) + DONE
        return DONE

    def failed(self, choice: CompletionChoice, reason: str, error: bytes, *, nests: bool = False) -> bytes:
        """Return the part that ends an answer in parts with an error.

        Args:
            choice: the first choice.
            reason: the reason.
            error: the body of a complete answer with this error.
            nests: whether it is an SGLang engine of a P/D pair: `/generate` has the error in a last row, other paths
                have it under "error".
        """
        if not nests:
            return b"data: " + error + b"\n\n"
        if self._asked.api != "generate":
            return b'data: {"error": ' + error + b"}\n\n"
        row = self._generated(choice)
        row["meta_info"]["finish_reason"] = {"type": "abort", "message": reason, "status_code": 500}
        return self._sse(row)

    def _event(self, choice: dict[str, Any], more: dict[str, Any] = _NOTHING) -> bytes:
        return self._sse(self._chunk_head | {"choices": [choice]} | more)

    @staticmethod
    def _sse(value: Any) -> bytes:
        return b"data: " + to_json(value) + b"\n\n"

    # ------------------------------------------------------------------------------------------------------- whole

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> Answer:
        """Return the complete answer."""
        asked = self._asked
        if asked.api == "generate":
            rows = [self._generated(each) for each in choices]
            return Answer(200, to_json(rows if asked.is_list or asked.n > 1 else rows[0]))
        found = []
        for each in choices:
            content = text.decode(each.tokens)
            if asked.api == "completions":
                if asked.echo:
                    content = text.decode(self._prompt(each)) + content
                body: dict[str, Any] = {"text": content}
            else:
                body = {"message": {"role": "assistant", "content": content, "refusal": None, "tool_calls": []}}
            ended = {"logprobs": None, "finish_reason": each.finish_reason, "stop_reason": None}
            tokens = self._token_ids(each, each.tokens) if asked.return_token_ids else {}
            found.append({"index": each.index} | body | ended | tokens)
        more: dict[str, Any] = {}
        if asked.return_token_ids and asked.api == "chat":
            more["prompt_token_ids"] = asked.prompts[0]
        if self._hands_over:  # with several prompts those of the first, with several choices those of the last
            more["kv_transfer_params"] = choices[asked.n - 1].hand_over
        return Answer(200, to_json(self._head | {"choices": found, "usage": usage.to_json()} | more))

    def _generated(self, choice: CompletionChoice) -> dict[str, Any]:
        """Return a row of SGLang's `/generate`, which repeats all tokens so far."""
        reason = None
        if choice.finish_reason is not None:
            reason = {"type": choice.finish_reason, "length": len(choice.tokens)}
        return {
            "text": text.decode(choice.tokens),
            "output_ids": choice.tokens,
            "meta_info": {
                "id": self._asked.id,
                "finish_reason": reason,
                "prompt_tokens": choice.usage.prompt_tokens,
                "weight_version": "default",
                "completion_tokens": len(choice.tokens),
                "cached_tokens": choice.usage.cached_tokens,
            },
        }
