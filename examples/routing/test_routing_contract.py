"""The eight policies hold what any router must: they use workers that come, leave out those that go, and let nobody
wait for ever.

SGLang's rule says what it believes of its tree. The others count nothing by themselves, so what the contract asks of
beliefs is skipped, and says so. Four go where a prefix is though loads speak against it, which `follows_prefix`
declares.
"""

from aibrix_rule import AibrixRule
from dynamo_cost import DynamoCost
from hash_ring import HashRing
from llm_d_scorers import Scorers
from ray_rule import RayRule
from sglang_rule import CacheAware
from trtllm_rule import KvCacheAware
from two_choices import TwoChoices

from pytest_kvmock.fleets import DynamoRouter
from pytest_kvmock.testing import RouterContract


class TestTwoChoices(RouterContract):
    def make_router(self):
        return TwoChoices()


class TestHashRing(RouterContract):
    follows_prefix = True

    def make_router(self):
        return HashRing()


class TestAibrixRule(RouterContract):
    follows_prefix = True

    def make_router(self):
        return AibrixRule()


class TestScorers(RouterContract):
    def make_router(self):
        return Scorers()


class TestCacheAware(RouterContract):
    follows_prefix = True

    def make_router(self):
        return CacheAware()


class TestRayRule(RouterContract):
    follows_prefix = True

    def make_router(self):
        return RayRule()


class TestDynamoCost(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self):
        return DynamoCost()


class TestKvCacheAware(RouterContract):
    backend = "trtllm"

    def make_router(self):
        return KvCacheAware()
