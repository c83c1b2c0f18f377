"""Frames of the plugin in a failure: none if the test, or an object that it plugged in, is to blame."""


def test_frames_of_the_plugin_are_left_out_if_a_call_was_refused(nested):
    result = nested(
        """
        from pytest_kvmock import Fleet, MockEngine
        from pytest_kvmock.fleets import synthetic_trace

        class Broken:
            def pick(self, request, candidates):
                return {}["worker"]  # the router's own line

        def test_refused(kv_harness):
            kv_harness.worker(0).serve("text")

        def test_router():
            Fleet([MockEngine()], Broken()).run(synthetic_trace(2))

        def test_router_of_a_right_trace():
            Fleet([MockEngine()], Broken(), trace_block_size=512).run(synthetic_trace(2))

        def test_bug(kv_harness, monkeypatch):
            monkeypatch.setattr("pytest_kvmock.engines.worker.Request", lambda *_: None)
            kv_harness.worker(0).prefill([1])
        """,
        "--tb=short",
    )
    failures = {}
    for part in result.stdout.str().split("\n_____")[1:]:
        name, _, text = part.partition("_\n")
        failures[name.strip("_ ").partition("[")[0]] = text.partition("\n=====")[0]
    assert "pytest_kvmock/" not in failures["test_refused"]
    assert "TypeError: tokens are token ids, not text" in failures["test_refused"]
    assert "pytest_kvmock/" not in failures["test_router"]
    assert failures["test_router"].count("ValueError: ") == 1
    of_router = failures["test_router_of_a_right_trace"]
    assert "pytest_kvmock/" not in of_router
    assert "the router's own line" in of_router
    assert "RouterError: Broken.pick() raised KeyError('worker')" in of_router
    assert "pytest_kvmock/engines/worker.py" in failures["test_bug"]  # this error is a bug of the plugin
