"""Random selection of a worker by temperature."""

from random import Random

import pytest

from pytest_kvmock.fleets import DynamoRouter


class Drawn(Random):
    """A generator that always draws the given number."""

    def __init__(self, number):
        super().__init__(0)
        self.number = number

    def random(self):
        return self.number


@pytest.mark.parametrize(("drawn", "position"), [(0.0, 0), (0.49, 0), (0.5, 0), (0.51, 1), (1.0, 1)], ids=str)
def test_a_random_number_selects_a_worker_by_cumulative_weight(drawn, position):
    router = DynamoRouter(router_temperature=0.001, rng=Drawn(drawn))
    assert position == router._sampled([7.0, 7.0, 8.0])  # weights 1, 1 and 0


def test_a_lower_temperature_selects_the_cheaper_worker_more_often():
    def share(temperature):
        router = DynamoRouter(router_temperature=temperature, rng=Random(1))
        return sum(not router._sampled([1.0, 2.0]) for _ in range(2000)) / 2000

    shares = [share(temperature) for temperature in (0.25, 1.0, 4.0)]
    assert pytest.approx(shares, abs=0.03) == [0.982, 0.731, 0.562]  # 1 / (1 + exp(-1 / temperature))
