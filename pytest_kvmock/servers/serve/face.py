"""The faces of vLLM, SGLang and TensorRT-LLM: their paths, arguments and answers; see `api`. This module opens no
socket.

One subject: the paths. TensorRT-LLM's face has OpenAI's two paths in their basic form, health, its events and
`/server_info`, as read from its code. vLLM 0.29's answers were recorded; those of other releases and of SGLang follow
their code (docs/how-to/serve.md). Engines without a role accept `kv_transfer_params` and `bootstrap_*` and ignore them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.servers.serve import request_checks as checks
from pytest_kvmock.servers.serve import text
from pytest_kvmock.servers.serve.adapters import Adapters
from pytest_kvmock.servers.serve.api import JSON, PLAIN, Answer, Call, Generate, to_json
from pytest_kvmock.servers.serve.metrics import LOAD_SECTIONS, METRICS_TYPE, loads_of, loads_text, metrics_text
from pytest_kvmock.servers.serve.network import shows
from pytest_kvmock.servers.serve.request_checks import BadRequest
from pytest_kvmock.servers.serve.served_pauses import SGLANG_MODES, VLLM_MODES
from pytest_kvmock.wire.codec.load_stream import LOAD_TOPIC

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.api import EngineView, Model

_NOT_FOUND: Final = Answer(404, b'{"detail":"Not Found"}')
_NOT_ALLOWED: Final = Answer(405, b'{"detail":"Method Not Allowed"}')
_UNAUTHORIZED: Final = Answer(401, b'{"error":"Unauthorized"}')
_SHOWN: Final = [text.decode((token,)) for token in range(text.VOCABULARY)]
"""The text of each token."""
_SGLANG_OUTPUT: Final = 128
"""Default number of output tokens of `/generate` (SGLang's `SamplingParams`)."""


class Face:
    """Answers requests to the HTTP port of one engine.

    Args:
        model: the served model.
        engine: the engine.
        seed: seed of generated request ids.

    Attributes:
        adapters: the loaded adapters.
    """

    def __init__(self, model: Model, engine: EngineView, seed: int = 0) -> None:
        self.model = model
        self._engine = engine
        self._names = Random(seed)  # noqa: S311 - mock data
        self._is_sglang = model.release.is_sglang
        self.adapters = Adapters(model.adapters, by_load=self._is_sglang)
        paths: dict[str, tuple[str, Callable[[Call], Answer | Generate | Awaitable[Answer]]]] = {
            "/health": ("GET", self._health),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
        }
        if model.release.is_trtllm:
            self._paths = paths | {
                "/kv_cache_events": ("POST", self._kv_cache_events),
                "/server_info": ("GET", self._trtllm_info),
            }
            return
        paths |= {
            "/v1/models": ("GET", self._models),
            "/metrics": ("GET HEAD", self._metrics),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        if self._is_sglang:
            paths |= {
                "/health_generate": ("GET", self._health),
                "/get_load": ("GET", self._get_load),
                "/v1/loads": ("GET", self._loads),
                "/generate": ("POST PUT", self._generate),
                "/flush_cache": ("GET POST", self._flush_cache),
                "/load_lora_adapter": ("POST", self._load_adapter),
                "/unload_lora_adapter": ("POST", self._unload_adapter),
                "/abort_request": ("GET POST", self._abort_request),
                "/pause_generation": ("POST", self._pause_generation),
                "/continue_generation": ("POST", self._continue_generation),
                "/release_memory_occupation": ("GET POST", self._release_memory),
                "/resume_memory_occupation": ("GET POST", self._resume_memory),
                "/v1/tokenize": ("POST", self._tokenize),
                "/v1/detokenize": ("POST", self._detokenize),
            }
            paths |= dict.fromkeys(("/server_info", "/get_server_info"), ("GET", self._server_info))
            paths |= dict.fromkeys(("/model_info", "/get_model_info"), ("GET", self._model_info))
        else:
            paths |= {
                "/ping": ("GET POST", self._health),
                "/version": ("GET", self._version),
                "/load": ("GET", self._load),
                "/v1/completions/render": ("POST", self._render_completions),
                "/v1/chat/completions/render": ("POST", self._render_chat),
                "/reset_prefix_cache": ("POST", self._reset),
                "/v1/load_lora_adapter": ("POST", self._load_adapter),
                "/v1/unload_lora_adapter": ("POST", self._unload_adapter),
                "/pause": ("POST", self._pause),
                "/resume": ("POST", self._resume),
                "/is_paused": ("GET", self._is_paused),
                "/sleep": ("POST", self._sleep),
                "/wake_up": ("POST", self._wake_up),
                "/release_kv_cache_memory": ("POST", self._release_kv_cache),
                "/is_sleeping": ("GET", self._is_sleeping),
            }
            if model.release.event_sources:
                paths["/kv_event_sources"] = ("GET", self._event_sources)
        self._paths = paths

    def answer(self, call: Call) -> Answer | Generate | Awaitable[Answer]:
        """Return the answer to a request (perhaps to be awaited), or the request for the engine. No input of a client
        makes it raise.
        """
        key = self.model.api_key
        if key is not None and self._needs_key(call) and not shows(call.headers.get("authorization", ""), key):
            return _UNAUTHORIZED
        found = self._paths.get(call.path)
        if found is None:
            return _NOT_FOUND
        methods, handler = found
        if call.method not in methods.split():
            return _NOT_ALLOWED
        try:
            return handler(call)
        except BadRequest as error:
            return self.refusal(error)

    def _needs_key(self, call: Call) -> bool:
        """Whether this path needs the API key: in vLLM paths of `/v1`, in SGLang all except health and metrics."""
        if call.method == "OPTIONS":
            return False
        return not call.path.startswith(("/health", "/metrics")) if self._is_sglang else call.path.startswith("/v1")

    def refusal(self, error: BadRequest) -> Answer:
        """Return the answer with the reason of a rejection, in the form of the release."""
        fields: dict[str, Any] = {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
        if not self.model.release.nested_errors:
            return Answer(error.status, to_json({"object": "error", **fields}))
        return Answer(error.status, to_json({"error": fields}))

    def busy(self) -> Answer:
        """Return the answer of an engine whose queue is full."""
        if self._is_sglang:
            return self.refusal(BadRequest("The request queue is full.", None, "ServiceUnavailableError", 503))
        message = "The engine is currently busy. Please try again later."
        return self.refusal(BadRequest(message, None, "Service Unavailable", 503))

    # ------------------------------------------------------------------------------------------------- plain paths

    def _health(self, _: Call) -> Answer:
        is_healthy = self._engine.error is None and not self._engine.is_draining
        return Answer(200 if is_healthy else 503, b"", PLAIN)

    def _models(self, _: Call) -> Answer:
        model = self.model
        cards, paths = [], self.adapters.paths()
        for name in (model.name, *paths):
            card: dict[str, Any] = {
                "id": name,
                "object": "model",
                "created": model.created,
                "owned_by": model.release.engine,
                "root": paths.get(name) or name,
                "parent": None if name == model.name else model.name,
                "max_model_len": model.max_model_len if name == model.name else None,
            }
            if not self._is_sglang:
                permission = dict.fromkeys(
                    ("allow_sampling", "allow_logprobs", "allow_view", "allow_create_engine", "allow_search_indices"),
                    True,
                )
                permission |= dict.fromkeys(("allow_create_engine", "allow_search_indices"), False)
                card["permission"] = [
                    {
                        "id": f"modelperm-{self._random_id()}",
                        "object": "model_permission",
                        "created": model.created,
                        **permission,
                        "allow_fine_tuning": False,
                        "organization": "*",
                        "group": None,
                        "is_blocking": False,
                    }
                ]
            cards.append(card)
        return Answer(200, to_json({"object": "list", "data": cards}))

    def _version(self, _: Call) -> Answer:
        return Answer(200, to_json({"version": self.model.release.version}))

    def _metrics(self, call: Call) -> Answer:
        page = (
            b""
            if call.method == "HEAD"
            else metrics_text(self.model, self._engine.states(), self.adapters.names).encode()
        )
        return Answer(200, page, METRICS_TYPE)

    def _load(self, _: Call) -> Answer:
        return Answer(200, to_json({"server_load": sum(each.running + each.waiting for each in self._engine.states())}))

    def _get_load(self, _: Call) -> Answer:
        size = self.model.block_size
        rows = [
            {
                "dp_rank": rank,
                "num_reqs": each.running + each.waiting,
                "num_waiting_reqs": each.waiting,
                "num_tokens": round(each.usage * each.num_blocks) * size,
            }
            for rank, each in enumerate(self._engine.states())
        ]
        return Answer(200, to_json(rows))

    def _loads(self, call: Call) -> Answer:
        query = call.query
        named = [each.strip() for each in query["include"].split(",")] if query.get("include") else ["all"]
        if wrong := sorted({*named} - LOAD_SECTIONS):
            raise BadRequest(
                f"Invalid include sections: {', '.join(wrong)}. Valid options: {sorted(LOAD_SECTIONS)}", "include"
            )
        rank = checks.integer(query, "dp_rank")
        rows = loads_of(self.model, self._engine.states(), {*named})
        rows = rows if rank is None else rows[rank : rank + 1] if rank >= 0 else []
        if query.get("format") == "prometheus":
            return Answer(200, loads_text(rows).encode(), METRICS_TYPE)
        now = datetime.now(UTC).isoformat()
        return Answer(200, to_json({"timestamp": now, "version": self.model.release.version, "loads": rows}))

    def _event_sources(self, _: Call) -> Answer:
        rows = {
            str(rank): {
                "endpoint": each["endpoint"],
                "replay_endpoint": each["replay_endpoint"],
                "topic": each["topic"],
                "buffer_steps": each["buffer_steps"],
                "publisher": "zmq",
                "data_parallel_rank": rank,
                "block_size": self.model.block_size,
                "model": self.model.name,
            }
            for rank, each in enumerate(self._engine.event_sources(), self.model.first_rank)
        }
        return Answer(200, to_json(rows))

    # ---------------------------------------------------------------------------------------------------- adapters

    def _load_adapter(self, call: Call) -> Answer:
        body = checks.body_of(call.headers.get("content-type", JSON), call.body)
        name, path = _given(body, "lora_name"), _given(body, "lora_path")
        in_place = checks.boolean(body, "load_inplace") and not self._is_sglang
        try:
            self._check_dp()
            if self.adapters.load(name, path, self.model.name, in_place=in_place):
                self._engine.number_adapter(name)
        except BadRequest as error:
            return self._adapters_refused(error, self.adapters.paths())
        return self._adapters_changed(f"Success: LoRA adapter '{name}' added successfully.")

    def _unload_adapter(self, call: Call) -> Answer:
        name = _given(checks.body_of(call.headers.get("content-type", JSON), call.body), "lora_name")
        try:
            self._check_dp()
            self.adapters.unload(name)
        except BadRequest as error:
            return self._adapters_refused(error, None)
        return self._adapters_changed(f"Success: LoRA adapter '{name}' removed successfully.")

    def _check_dp(self) -> None:
        """Raise SGLang's error if it has several ranks; a client of SGLang only sees status 500."""
        if self._is_sglang and self.model.ranks > 1:
            raise BadRequest("dp_size must be 1 for dynamic lora loading")

    def _adapters_changed(self, message: str) -> Answer:
        if self._is_sglang:
            return Answer(
                200, to_json({"success": True, "error_message": "", "loaded_adapters": self.adapters.paths()})
            )
        return Answer(200, message.encode(), PLAIN)

    def _adapters_refused(self, error: BadRequest, loaded: Mapping[str, str] | None) -> Answer:
        """Return the answer to a rejected change of adapters; SGLang's has the form of a success, with `loaded`."""
        if not self._is_sglang:
            return self.refusal(error)
        refused = {"success": False, "error_message": error.message, "loaded_adapters": loaded}
        return Answer(error.status, to_json(refused))

    # -------------------------------------------------------------------------------------- pauses, sleeps, resets

    def _reset(self, call: Call) -> Answer:
        running, external = (_flag(call, f"reset_{name}") for name in ("running_requests", "external"))
        return Answer(200, to_json({"success": self._engine.pauses.reset(running=running, external=external)}))

    def _pause(self, call: Call) -> Answer:
        mode = _chosen(call.query.get("mode", "abort"), "mode", VLLM_MODES)
        self._engine.pauses.pause(mode, clears=_flag(call, "clear_cache", "true"))
        return Answer(200, to_json({"status": "paused"}))

    def _resume(self, _: Call) -> Answer:
        self._engine.pauses.resume()
        return Answer(200, to_json({"status": "resumed"}))

    def _is_paused(self, _: Call) -> Answer:
        return Answer(200, to_json({"is_paused": self._engine.pauses.paused is not None}))

    def _sleep(self, call: Call) -> Answer:
        level = checks.integer(call.query, "level", 1)
        assert level is not None
        self._engine.pauses.sleep(level, _chosen(call.query.get("mode", "abort"), "mode", VLLM_MODES))
        return Answer(200)

    def _release_kv_cache(self, _: Call) -> Answer:
        self._engine.pauses.sleep(1, "abort")
        return Answer(200)

    def _wake_up(self, _: Call) -> Answer:
        self._engine.pauses.resume()
        return Answer(200)

    def _is_sleeping(self, _: Call) -> Answer:
        return Answer(200, to_json({"is_sleeping": self._engine.pauses.sleeps is not None}))

    def _abort_request(self, call: Call) -> Answer:
        """SGLang's abort, of requests whose id begins with `rid`, or of all."""
        body = checks.body_of(call.headers.get("content-type", JSON), call.body)
        rid, every = checks.text(body, "rid") or "", checks.boolean(body, "abort_all")
        if rid or every:
            self._engine.pauses.abort(lambda name: every or name.startswith(rid))
        return Answer(200)

    def _pause_generation(self, call: Call) -> Answer:
        body = checks.body_of(call.headers.get("content-type", JSON), call.body) if call.body else {}
        self._engine.pauses.pause_in_place(_chosen(body.get("mode", "abort"), "mode", SGLANG_MODES))
        return Answer(200, to_json({"message": "Generation paused successfully.", "status": "ok"}))

    def _continue_generation(self, _: Call) -> Answer:
        self._engine.pauses.resume()
        return Answer(200, to_json({"message": "Generation continued successfully.", "status": "ok"}))

    def _release_memory(self, _: Call) -> Answer:
        if not self._engine.pauses.flush():
            raise BadRequest("release_memory_occupation needs an idle server: requests are running or waiting.")
        self._engine.pauses.pause_in_place("in_place")
        return Answer(200)

    def _resume_memory(self, _: Call) -> Answer:
        self._engine.pauses.resume()
        return Answer(200)

    async def _flush_cache(self, call: Call) -> Answer:
        try:
            timeout_s = checks.seconds(call.query, "timeout")
        except BadRequest as error:
            return self.refusal(error)
        reason = await self._engine.pauses.flush_within(timeout_s)
        if reason is None:
            message = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"  # noqa: E501
            return Answer(200, message.encode(), PLAIN)
        return Answer(400, (reason or "Flush cache failed.\n").encode(), PLAIN)

    def _kv_cache_events(self, _: Call) -> Answer:
        """TensorRT-LLM's poll: the events since the last poll."""
        return Answer(200, to_json(self._engine.take_events()))

    def _trtllm_info(self, _: Call) -> Answer:
        return Answer(
            200, to_json({"tokens_per_block": self.model.block_size, "kv_cache_hash_algo": self._engine.hash_algo()})
        )

    def _server_info(self, _: Call) -> Answer:
        model, sources = self.model, self._engine.event_sources()
        first = sources[0]
        states = self._engine.states()
        loads = {} if first["load_port"] is None else {"load_endpoint_port_base": first["load_port"]}
        if loads:
            loads["load_topic"] = LOAD_TOPIC.decode()
        return Answer(
            200,
            to_json(
                {
                    "model_path": model.name,
                    "served_model_name": model.name,
                    "tokenizer_path": model.name,
                    "dp_size": model.ranks,
                    "tp_size": 1,
                    "page_size": model.block_size if model.page_size is None else model.page_size,
                    "version": model.release.version,
                    "max_total_num_tokens": states[0].num_blocks * model.block_size,
                    "context_length": model.max_model_len,
                    "disaggregation_mode": model.role or "null",
                    "disaggregation_bootstrap_port": self._engine.bootstrap_port,
                    "kv_events": {
                        "publisher": "zmq",
                        "endpoint_host": first["host"],
                        "endpoint_port_base": first["port"],
                        "topic": first["topic"],
                        "block_size": model.block_size,
                        "dp_size": model.ranks,
                        "replay_endpoint_port_base": first["replay_port"],
                        **loads,
                    },
                    "internal_states": [
                        {"effective_max_running_requests_per_dp": None, "num_running_reqs": each.running}
                        for each in states
                    ],
                }
            ),
        )

    def _model_info(self, _: Call) -> Answer:
        name = self.model.name
        return Answer(
            200,
            to_json(
                {
                    "model_path": name,
                    "tokenizer_path": name,
                    "is_generation": True,
                    "preferred_sampling_params": None,
                    "weight_version": "default",
                }
            ),
        )

    # ----------------------------------------------------------------------------------------------------- tokens

    def _tokenize(self, call: Call) -> Answer:
        body = checks.body_of(call.headers.get("content-type", JSON), call.body)
        if "messages" in body:
            prompt = text.chat_text(
                checks.check_messages(body), generates=bool(body.get("add_generation_prompt", True))
            )
        elif "prompt" in body or "text" in body:
            name = "prompt" if "prompt" in body else "text"
            prompt = checks.text(body, name) or ""
        else:
            wrapped = "function-wrap[__log_extra_fields__()]"
            raise checks.validation_error(
                *(
                    {"type": "missing", "loc": ("body", wrapped, name), "msg": "Field required", "input": body}
                    for name in ("prompt", "messages")
                )
            )
        self._lora(body)
        tokens = text.encode(prompt)
        shown = [_SHOWN[token] for token in tokens] if checks.boolean(body, "return_token_strs") else None
        answer = {"count": len(tokens), "max_model_len": self.model.max_model_len, "tokens": tokens}
        return Answer(200, to_json(answer | {"token_strs": shown}))

    def _detokenize(self, call: Call) -> Answer:
        body = checks.body_of(call.headers.get("content-type", JSON), call.body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or checks.token_errors(tokens, ("body", "tokens")):
            loc = ("body", "tokens")
            kind = "missing" if "tokens" not in body else "list_type"
            message = "Field required" if "tokens" not in body else "Input should be a valid list"
            raise checks.validation_error({"type": kind, "loc": loc, "msg": message, "input": tokens})
        self._lora(body)
        found = text.decode(map(int, tokens))
        return Answer(200, to_json({"text": found} if self._is_sglang else {"prompt": found}))

    # -------------------------------------------------------------------------------------------------- generation

    def _completions(self, call: Call) -> Generate:
        body = checks.body_of(call.headers.get("content-type", ""), call.body)
        prompt = body.get("prompt")
        prompts = [] if prompt in (None, "") else checks.prompts_of(prompt)
        out = self._common(call, body, "completions")
        asked = checks.integer(body, "max_tokens", checks.DEFAULT_OUTPUT)
        assert asked is not None
        self._check_output(asked)
        checks.check_all_choices(len(prompts), out.n)
        out.max_tokens = asked
        out.prompts = tuple(self._tokens(each, asked) for each in prompts)
        out.is_list = len(prompts) > 1
        out.hand_overs = self._hand_overs(body, len(prompts))
        return out

    def _hand_overs(self, body: Mapping[str, Any], prompts: int) -> tuple[Mapping[str, Any] | None, ...]:
        """Return the hand-over parameters of each prompt's leg; empty if the engine is in no P/D pair."""
        if self.model.role is None:
            return ()
        if self._is_sglang:
            return checks.rooms_of(body, prompts)
        given = checks.mapping(body, "kv_transfer_params")
        return (None if body.get("kv_transfer_params") is None else given,) * prompts

    def _chat(self, call: Call) -> Generate:
        body = checks.body_of(call.headers.get("content-type", ""), call.body)
        messages = checks.check_messages(body) if body.get("messages") != [] or "messages" not in body else []
        out = self._common(call, body, "chat")
        if not messages:
            checks.check_messages(body)
        asked = checks.integer(body, "max_completion_tokens", checks.integer(body, "max_tokens"))
        if asked is not None:
            self._check_output(asked)
        prompt = text.chat_text(messages, generates=bool(body.get("add_generation_prompt", True)))
        tokens = self._tokens(prompt, asked or 0)
        if asked is None:  # as many tokens as fit
            asked = self.model.max_model_len - len(tokens)
            self._check_length(len(tokens), max(1, asked))
        out.max_tokens = asked
        out.prompts = (tokens,)
        out.hand_overs = self._hand_overs(body, 1)
        return out

    def _common(self, call: Call, body: Mapping[str, Any], api: str) -> Generate:
        """Return the fields that requests of both APIs share, checked in vLLM's order."""
        stream = checks.boolean(body, "stream")
        options = checks.mapping(body, "stream_options")
        checks.text(body, "model")
        count = checks.integer(body, "n", 1)
        for name in ("max_tokens", "max_completion_tokens"):
            checks.integer(body, name)
        if options and not stream:
            message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
            raise BadRequest(message, "stream_options")
        if api == "completions" and body.get("prompt") in (None, ""):
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise BadRequest(message, "prompt")
        salt = checks.text(body, "cache_salt")
        if salt == "":
            message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
            raise BadRequest(message, "cache_salt")
        lora = self._lora(body)
        if api == "completions" and body.get("prompt") == []:
            raise BadRequest("You must pass at least one prompt")
        assert count is not None
        checks.check_choices(count)
        includes_usage = checks.boolean(options, "include_usage")
        name = call.headers.get("x-request-id") or self._random_id()
        return Generate(
            "completions" if api == "completions" else "chat",
            f"{'cmpl' if api == 'completions' else 'chatcmpl'}-{name}",
            body.get("model"),
            (),
            0,
            n=count,
            stream=stream,
            include_usage=includes_usage,
            continuous_usage=checks.boolean(options, "continuous_usage_stats") and (includes_usage or self._is_sglang),
            return_token_ids=not self._is_sglang and checks.boolean(body, "return_token_ids"),
            lora_name=lora,
            cache_salt=salt,
            report_mode=None if self._is_sglang else checks.report_mode(body),
            rank=self._rank(call, body),
            priority=checks.integer(body, "priority", 0) or 0,
            echo=checks.boolean(body, "echo"),
        )

    def _rank(self, call: Call, body: Mapping[str, Any]) -> int | None:
        """Return the rank that a request names, by its position behind this port; None if it names no rank.

        A header overrides the body. vLLM ignores a header that is no integer, and picks a rank
        (`_get_data_parallel_rank`).
        """
        names = ("routed_dp_rank", "data_parallel_rank") if self._is_sglang else ("data_parallel_rank",)
        asked = next((body[name] for name in names if body.get(name) is not None), None)
        header = call.headers.get("x-data-parallel-rank")
        if header is not None and (self._is_sglang or checks.is_integer_text(header)):
            asked = header
        return checks.check_rank(asked, self.model.ranks)

    def _lora(self, body: Mapping[str, Any]) -> str | None:
        """Return the adapter that a request names as its model.

        Raises:
            BadRequest: an unknown model; SGLang accepts any name.
        """
        name = checks.text(body, "model")
        if name in self.adapters.names:
            return name
        if name and name != self.model.name and not self._is_sglang:
            raise BadRequest(f"The model `{name}` does not exist.", "model", "NotFoundError", 404)
        return None

    def _check_output(self, asked: int) -> None:
        if self._is_sglang:
            if asked < 1:
                raise BadRequest(f"max_new_tokens must be at least 1, got {asked}.", "max_tokens")
        else:
            checks.check_output(asked, self.model.max_model_len)

    def _check_length(self, count: int, output: int) -> None:
        most = self.model.max_model_len
        if not self._is_sglang:
            checks.check_token_length(count, output, most)
        elif count >= most:
            raise BadRequest(f"The input ({count} tokens) is longer than the model's context length ({most} tokens).")
        elif count + output > most:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a "
                f"total of {count + output} tokens: {count} tokens from the input messages and {output} tokens for the "
                "completion."
            )

    def _tokens(self, prompt: str | list[int], output: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not self._is_sglang:
                checks.check_text_length(prompt, output, self.model.max_model_len)
            elif len(prompt) >= self.model.max_model_len:  # too long in any case, so it is not tokenized
                self._check_length(len(prompt.encode(errors="replace")), output)
            tokens = text.encode(prompt)
            self._check_length(len(tokens), output)
        else:
            self._check_length(len(prompt), output)  # first, so that a prompt that is too long is not scanned
            tokens = tuple(prompt)
            if max(tokens, default=0) >= 2**32:
                raise BadRequest(f"Token id {max(tokens)} is out of vocabulary", "prompt")
        if not tokens:
            raise BadRequest("The decoder prompt cannot be empty", "prompt")
        return tokens

    def _render_completions(self, call: Call) -> Answer:
        out = self._completions(call)
        return Answer(200, to_json([self._rendered(out, tokens) for tokens in out.prompts]))

    def _render_chat(self, call: Call) -> Answer:
        out = self._chat(call)
        return Answer(200, to_json(self._rendered(out, out.prompts[0])))

    def _rendered(self, out: Generate, tokens: tuple[int, ...]) -> dict[str, Any]:
        return {
            "request_id": out.id,
            "token_ids": tokens,
            "features": None,
            "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_tokens": out.max_tokens, "n": out.n},
            "model": out.model,
            "stream": out.stream,
            "stream_options": None,
            "cache_salt": out.cache_salt,
            "priority": out.priority,
            "kv_transfer_params": None,
        }

    def _generate(self, call: Call) -> Generate:
        """Handle SGLang's native API."""
        body = checks.body_of(call.headers.get("content-type", JSON), call.body)
        options = checks.mapping(body, "sampling_params")
        asked = checks.integer(options, "max_new_tokens", _SGLANG_OUTPUT)
        assert asked is not None
        self._check_output(asked)
        count = checks.integer(options, "n", 1)
        assert count is not None
        checks.check_choices(count)
        name = "text" if body.get("text") is not None else "input_ids"
        given = body.get(name)
        if given in (None, "", []):
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        prompts = checks.prompts_of(given)
        checks.check_all_choices(len(prompts), count)
        if any(isinstance(each, str) is not (name == "text") for each in prompts):
            raise BadRequest(f"{name} must be {'text' if name == 'text' else 'token ids'}, or a list of them", name)
        is_list = isinstance(given, list) and not (name == "input_ids" and len(prompts) == 1 and prompts[0] == given)
        rid = body.get("rid")
        lora = body.get("lora_path")
        return Generate(
            "generate",
            rid if isinstance(rid, str) else self._random_id(),
            self.model.name,
            tuple(self._tokens(each, asked) for each in prompts),
            asked,
            n=count,
            is_list=is_list,
            hand_overs=self._hand_overs(body, len(prompts)),
            stream=checks.boolean(body, "stream"),
            lora_name=lora if isinstance(lora, str) and lora in self.adapters.names else None,
            rank=self._rank(call, body),
            priority=checks.integer(body, "priority", 0) or 0,
        )

    def _random_id(self) -> str:
        return f"{self._names.getrandbits(64):016x}"


def _given(body: Mapping[str, Any], name: str) -> str:
    """Return a text that a body must have.

    Raises:
        BadRequest: the body does not have it.
    """
    found = checks.text(body, name)
    if found is None:
        missing = {"type": "missing", "loc": ("body", name), "msg": "Field required", "input": body}
        raise checks.validation_error(missing)
    return found


def _flag(call: Call, name: str, default: str = "false") -> bool:
    """Return a flag of a query."""
    return call.query.get(name, default).lower() in ("true", "1", "yes", "on")


def _chosen(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is allowed.

    Raises:
        BadRequest: it is not.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise BadRequest(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r:.80}", name)
