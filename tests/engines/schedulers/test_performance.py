"""Performance models: times of prefill and decode, in milliseconds."""

import math
import random
import zlib
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from npz_files import PROFILE, npy, write_npz

from pytest_kvmock.engines import CallableModel, InterpolatedModel, PolynomialModel
from pytest_kvmock.engines.schedulers.performance import PerformanceModel, make_performance_model

TIMES = "interpolated_times_1.2.1.json"


def nanoseconds(ms):
    """Round a duration as Dynamo does: seconds as a float, exactly rounded, ties to even."""
    return round(Fraction(ms / 1000) * 10**9)


def as_ms(ns):
    return (ns // 10**9 + ns % 10**9 / 1e9) * 1000


# ---------------------------------------------------------------------------------------------------------- polynomial


@pytest.mark.parametrize(
    ("expected", "prompt", "in_use"),
    [  # prompt and cached tokens, blocks in use and in total; nanoseconds from replays of Dynamo 1.2.1
        (25_261702, (128, 0), (2, 100)),
        (24_812019, (192, 128), (3, 100)),
        (56_679659, (448, 0), (7, 8)),  # 1 less than with -25.74 * p * p
        (1091_227302, (35_000, 0), (547, 1000)),  # 1 less than with 4.209989e-07 * n * n
        (112_789740, (5000, 0), (79, 1000)),
    ],
)
def test_the_polynomial_model_equals_dynamo_to_the_nanosecond(expected, prompt, in_use):
    model = PolynomialModel()
    active, total = (blocks * 64 for blocks in in_use)
    assert (
        nanoseconds(model.prefill_ms(1, *prompt)) + nanoseconds(model.decode_ms(active, total, prompt[0])) == expected
    )


def test_the_prefill_time_depends_on_the_new_tokens_of_the_whole_batch():
    model = PolynomialModel()
    assert model.prefill_ms(1, 12, 0) == model.prefill_ms(3, 12, 8) == model.prefill_ms(2, 106, 100)


def test_the_decode_time_depends_only_on_the_share_of_the_cache_in_use():
    model = PolynomialModel()
    assert model.decode_ms(32, 64, 1) == model.decode_ms(320, 640, 999)


@pytest.mark.parametrize(
    ("semantics", "prefill", "decode"),
    [("1.2.1", 16.50142, -25.74 * 4 + 54.01 * 2 + 5.74), ("1.6.1", 0.0, -25.74 + 54.01 + 5.74)],
)
def test_semantics_1_6_1_charge_nothing_for_zero_new_tokens_and_clamp_the_cache_share(semantics, prefill, decode):
    model = PolynomialModel(semantics)
    assert [prefill] * 3 == [model.prefill_ms(*each) for each in ((0, 0, 0), (0, 8, 0), (2, 8, 8))]
    assert decode == model.decode_ms(128, 64, 8)


def test_the_decode_time_of_the_polynomial_is_at_least_one_millisecond():
    assert PolynomialModel().decode_ms(300, 100, 8) == 1.0
    assert PolynomialModel().decode_ms(0, 0, 0) == 5.74


def test_unknown_semantics_are_refused():
    with pytest.raises(ValueError, match=r"^semantics: got '1.2'; did you mean '1.2.1'\? allowed: 1.2.1, 1.6.1$"):
        PolynomialModel("1.2")
    with pytest.raises(ValueError, match=r"^semantics: got None; allowed: 1.2.1, 1.6.1$"):
        InterpolatedModel(**PROFILE, semantics=None)


# ----------------------------------------------------------------------------------------------------------
# interpolated


@pytest.mark.parametrize("fortran", [False, True], ids=["C order", "Fortran order"])
def test_interpolated_times_equal_the_recorded_ones_of_dynamo_bit_for_bit(recording, tmp_path, fortran):
    compared = 0
    for number, case in enumerate(recording(TIMES)["cases"]):
        path = write_npz(tmp_path / f"{number}.npz", case["arrays"], fortran=fortran, compressed=number % 2 == 0)
        model = InterpolatedModel.from_npz(path)
        for isl, expected in case["times"]:
            prefill = model.prefill_ms(1, isl, 0)
            decode = model.decode_ms(-(-isl // 64) * 64, 6400, isl)
            assert as_ms(nanoseconds(prefill)) + as_ms(nanoseconds(decode)) == expected, (number, isl)
            compared += 1
    assert compared == 345


def test_a_prefill_without_new_tokens_is_extrapolated_by_1_2_1_and_free_by_1_6_1():
    profile = {**PROFILE, "prefill_isl": [100.0, 1000.0], "prefill_ttft_ms": [10.0, 33.3]}
    # From a replay with engine_type="sglang": the second of two identical prompts.
    assert nanoseconds(InterpolatedModel(**profile).prefill_ms(1, 128, 128)) == 7_411111
    assert InterpolatedModel(**profile, semantics="1.6.1").prefill_ms(1, 128, 128) == 0.0


@given(st.integers(0, 500), st.integers(0, 500))
def test_interpolation_and_extrapolation_reproduce_a_plane(active, context):
    def plane(x, y):
        return 2 + x / 4 + y / 8

    axis = [16.0, 32.0, 128.0]
    model = InterpolatedModel(
        axis, [plane(x, 0) for x in axis], axis, axis, [[plane(x, y) for y in axis] for x in axis]
    )
    assert plane(active, 0) == model.prefill_ms(1, active, 0)
    assert plane(active, context) == model.decode_ms(active, 0, context)


@given(st.randoms(use_true_random=False))
def test_an_interpolated_model_returns_the_measured_times_at_its_points(rnd):
    axis = sorted(rnd.sample(range(1, 1000), 4))
    times = [[float(rnd.randint(1, 100)) for _ in axis] for _ in axis]
    model = InterpolatedModel(axis, times[0], axis, axis, times)
    assert times[0] == pytest.approx([model.prefill_ms(1, isl, 0) for isl in axis])
    for row, active in zip(times, axis, strict=True):
        assert row == pytest.approx([model.decode_ms(active, 0, context) for context in axis])


def test_interpolated_prefill_is_never_negative_and_decode_at_least_a_millisecond():
    model = InterpolatedModel([1, 2], [10, 5], [1, 2], [1, 2], [[9, 8], [5, 4]])
    assert model.prefill_ms(1, 100, 0) == 0.0
    assert model.decode_ms(100, 0, 100) == 1.0


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f4", "<i8", "<i4", ">i4"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_npz_profile_can_have_any_numeric_dtype_and_format_version(tmp_path, dtype, version):
    whole = {**PROFILE, "prefill_ttft_ms": [10.0, 33.0]}
    path = write_npz(tmp_path / "a.npz", {**whole, "note": b"read by nobody"}, dtype=dtype, version=version)
    assert InterpolatedModel(**whole) == InterpolatedModel.from_npz(str(path))


def test_npz_members_without_suffix_are_read_as_by_dynamo(tmp_path):
    path = write_npz(tmp_path / "a.npz", PROFILE, suffix="")
    assert InterpolatedModel(**PROFILE) == InterpolatedModel.from_npz(path)


BAD_ARRAYS = [
    ({"prefill_isl": [100.0]}, "prefill_isl must have at least 2 points, got 1"),
    ({"prefill_isl": []}, "prefill_isl must have at least 2 points, got 0"),
    (
        {"prefill_isl": [1000.0, 100.0]},
        "prefill_isl must be strictly ascending, got 1000.0 at 0 and 100.0 after it",
    ),
    (
        {"decode_context_length": [10.0, 100.0, 100.0]},
        "decode_context_length must be strictly ascending, got 100.0 at 1 and 100.0 after it",
    ),
    ({"decode_active_kv_tokens": [math.nan, 1.0]}, "decode_active_kv_tokens[0] must be a finite number, got nan"),
    ({"prefill_isl": [1.0, math.inf]}, "prefill_isl[1] must be a finite number, got inf"),
    ({"prefill_ttft_ms": [1.0, math.nan]}, "prefill_ttft_ms[1] must be a finite number, got nan"),
    (
        {"prefill_ttft_ms": [1.0, 2.0, 3.0]},
        "prefill_ttft_ms must have one entry for each of the 2 of prefill_isl, got 3",
    ),
    (
        {"decode_itl": [[3.0, 4.0, 5.0], [6.0, math.nan, 8.0]]},
        "decode_itl[1][1] must be a finite number, got nan",
    ),
    (
        {"decode_itl": [[3.0, 4.0, 5.0]] * 3},
        "decode_itl must have one entry for each of the 2 of decode_active_kv_tokens, got 3",
    ),
    (
        {"decode_itl": [[3.0, 4.0]] * 2},
        "decode_itl[0] must have one entry for each of the 3 of decode_context_length, got 2",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_ARRAYS)
def test_invalid_arrays_of_a_profile_are_named(tmp_path, wrong, message):
    with pytest.raises(ValueError) as caught:
        InterpolatedModel(**{**PROFILE, **wrong})
    assert str(caught.value) == message
    path = write_npz(tmp_path / "a.npz", {**PROFILE, **wrong})
    with pytest.raises(ValueError) as caught:
        InterpolatedModel.from_npz(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("value", [5, ["a", "b"], None, [None, 1.0]], ids=repr)
def test_an_array_that_is_not_a_sequence_of_numbers_is_refused(value):
    with pytest.raises(ValueError) as caught:
        InterpolatedModel(**{**PROFILE, "prefill_isl": value})
    assert str(caught.value) == f"prefill_isl must be a sequence of numbers, got {value!r}"


def test_a_table_that_is_not_a_sequence_of_rows_is_refused():
    with pytest.raises(ValueError) as caught:
        InterpolatedModel(**{**PROFILE, "decode_itl": 5})
    assert str(caught.value) == "decode_itl must be a sequence of rows of numbers, got 5"
    with pytest.raises(ValueError) as caught:
        InterpolatedModel(**{**PROFILE, "decode_itl": [1.0, 2.0]})
    assert str(caught.value) == "decode_itl[0] must be a sequence of numbers, got 1.0"


def test_an_unreadable_profile_file_is_named(tmp_path):
    text = tmp_path / "text.npz"
    text.write_text("no zip")
    for path, message in (
        (tmp_path / "none.npz", "there is no file {}"),
        (text, "{} is not an .npz file (a zip archive of .npy arrays): File is not a zip file"),
        (tmp_path, "{} cannot be read: Is a directory"),
    ):
        with pytest.raises(ValueError) as caught:
            InterpolatedModel.from_npz(path)
        assert message.format(path) == str(caught.value)


@pytest.mark.parametrize("name", PROFILE)
def test_a_missing_array_is_named_with_the_arrays_of_the_file(tmp_path, name):
    rest = {each: values for each, values in PROFILE.items() if each != name}
    path = write_npz(tmp_path / "a.npz", rest)
    with pytest.raises(ValueError) as caught:
        InterpolatedModel.from_npz(path)
    begin, _, known = str(caught.value).partition("; it has ")
    assert (f"{path} has no array {name!r}", sorted(rest)) == (begin, known.split(", "))


GOOD = npy([1.0, 2.0])


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", "it is not an .npy array"),
        (b"\x93NUMPX" + GOOD[6:], "it is not an .npy array"),
        (GOOD[:6] + b"\x09\x01" + GOOD[8:], "version 9.1 of the .npy format is not known"),
        (GOOD[:6] + b"\x02\x00\x01\x00", "its header is cut off"),
        (GOOD[:-8], "an array of shape (2,) must have 16 bytes of data, got 8"),
        (GOOD[:20], "its header is cut off"),
        (GOOD + b"\0", "an array of shape (2,) must have 16 bytes of data, got 17"),
        (GOOD.replace(b"descr", b"dascr"), "its numbers must be of one of the types {types}, got 'None'"),
        (GOOD.replace(b"'<f8'", b"'|O' "), "its numbers must be of one of the types {types}, got '|O'"),
        (npy([1.0, 2.0], dtype="<c8"), "its numbers must be of one of the types {types}, got '<c8'"),
        (npy([1.0] * 4, shape=(2, -2)), None),
        (npy([1.0] * 4, shape="no shape"), None),
        (npy([1.0] * 8, shape=(2, 2, 2), fortran=True), "arrays in Fortran order must have 1 or 2 {rest}"),
    ],
)
def test_an_npz_member_that_is_not_a_numeric_array_is_named(tmp_path, member, message):
    path = write_npz(tmp_path / "a.npz", {**PROFILE, "prefill_isl": member})
    with pytest.raises(ValueError) as caught:
        InterpolatedModel.from_npz(path)
    begin, _, expected_message = str(caught.value).partition(" cannot be read: ")
    assert begin == f"array 'prefill_isl' of {path}"
    types = "<f4, <f8, <i4, <i8, <u4, <u8 (or big-endian)"
    rest = "dimensions, got shape (2, 2, 2)"
    if message is None:
        assert expected_message.startswith(
            "its header is not that of an .npy array: b\"{'descr': '<f8', 'fortran_order': False"
        )
    else:
        assert message.format(types=types, rest=rest) == expected_message


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("prefill_isl", [[1.0, 2.0]], "prefill_isl must have 1 dimension, got shape (1, 2)"),
        ("decode_itl", [1.0, 2.0], "decode_itl must have 2 dimensions, got shape (2,)"),
    ],
)
def test_an_array_with_the_wrong_number_of_dimensions_is_named(tmp_path, name, values, message):
    path = write_npz(tmp_path / "a.npz", {**PROFILE, name: values})
    with pytest.raises(ValueError) as caught:
        InterpolatedModel.from_npz(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_file_is_read_or_raises_a_value_error(tmp_path, compressed):
    """A file with any wrong byte is refused, or read as it is."""
    whole = write_npz(tmp_path / "a.npz", PROFILE, compressed=compressed).read_bytes()
    rnd = random.Random(zlib.crc32(whole))
    refusals = []
    for _ in range(300):
        at = rnd.randrange(len(whole))
        path = tmp_path / "b.npz"
        path.write_bytes(rnd.choice([whole[:at], whole[:at] + bytes((rnd.randrange(256),)) + whole[at + 1 :]]))
        try:
            InterpolatedModel.from_npz(path)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 200
    assert [refusal for refusal in refusals if str(path) not in refusal] == []


# ------------------------------------------------------------------------------------------------------------ callables


def test_a_callable_receives_the_composition_of_a_pass():
    calls = []
    model = CallableModel(lambda *given: calls.append(given) or 1, lambda *given: calls.append(given) or 2)
    assert (model.prefill_ms(3, 20, 4), model.decode_ms(64, 640, 9)) == (1.0, 2.0)
    assert calls == [(3, 20, 4), (64, 640, 9)]


def test_a_number_as_performance_model_is_a_constant_time():
    model = CallableModel(prefill=5, decode=0.25)
    assert (model.prefill_ms(3, 20, 4), model.decode_ms(64, 640, 9)) == (5.0, 0.25)


A_TIME = "a finite number of milliseconds of at least 0"


@pytest.mark.parametrize("wrong", [-0.5, math.nan, math.inf, None, "5", True], ids=repr)
def test_an_invalid_time_from_a_callable_is_reported_with_its_arguments(wrong):
    model = CallableModel(lambda *_: wrong, lambda *_: wrong)
    with pytest.raises(ValueError) as caught:
        model.prefill_ms(3, 20, 4)
    assert str(caught.value) == f"prefill time for batch=3, isl=20, prefix=4 must be {A_TIME}, got {wrong!r}"
    with pytest.raises(ValueError) as caught:
        model.decode_ms(64, 640, 9)
    call = "active_kv_tokens=64, total_kv_tokens=640, context_length=9"
    assert str(caught.value) == f"decode time for {call} must be {A_TIME}, got {wrong!r}"


@pytest.mark.parametrize("wrong", [-1, math.nan, "5", None], ids=repr)
def test_an_invalid_time_is_refused(wrong):
    for field in ("prefill", "decode"):
        with pytest.raises(ValueError) as caught:
            CallableModel(**{"prefill": 1, "decode": 1, field: wrong})
        assert str(caught.value) == f"{field} must be callable, or {A_TIME}, got {wrong!r}"


@pytest.mark.parametrize("time", [Decimal("2.5"), Fraction(5, 2), 2.5], ids=repr)
def test_any_numeric_type_is_accepted_as_a_time(time):
    model = CallableModel(lambda *_: time, time)
    for ms in (model.prefill_ms(1, 1, 0), model.decode_ms(1, 1, 1)):
        assert (2.5, float) == (ms, type(ms))


# ------------------------------------------------------------------------------------------------------ what users give


class OwnModel:
    def prefill_ms(self, batch, isl, prefix):
        return batch * (isl - prefix)

    def decode_ms(self, active_kv_tokens, total_kv_tokens, context_length):
        return -1 if context_length > 10 else 7


def test_a_performance_model_can_be_made_from_none_a_model_or_a_pair():
    polynomial = PolynomialModel("1.6.1")
    assert polynomial == make_performance_model(None, "1.6.1")
    assert polynomial is make_performance_model(polynomial, "1.2.1")
    assert make_performance_model((5, 7)).prefill_ms(1, 1, 0) == 5.0
    assert make_performance_model([lambda *_: 5, lambda *_: 7]).decode_ms(1, 1, 1) == 7.0


def test_the_times_of_a_custom_model_are_checked():
    own = OwnModel()
    assert isinstance(own, PerformanceModel)
    model = make_performance_model(own)
    assert (model.prefill_ms(2, 10, 2), model.decode_ms(1, 1, 10)) == (16.0, 7.0)
    with pytest.raises(ValueError, match=f"must be {A_TIME}, got -1$"):
        model.decode_ms(1, 1, 11)


@pytest.mark.parametrize("wrong", ["polynomial", 5, (1,), (1, 2, 3), OwnModel, object()])
def test_a_value_that_is_not_a_model_is_refused(wrong):
    with pytest.raises(ValueError) as caught:
        make_performance_model(wrong)
    assert str(caught.value) == (
        "performance_model must have the methods prefill_ms() and decode_ms(), or be a pair of callables or of "
        f"milliseconds (prefill, decode), or None, got {wrong!r:.80}"
    )
