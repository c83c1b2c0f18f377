"""The eight policies fulfil the contract of every router: they use workers that join, leave out those that leave, and
let no request wait for ever.

SGLang's rule reports the beliefs of its tree. The others count nothing themselves, so tests of beliefs are skipped,
which the run reports. Four follow a prefix against the loads, which `follows_prefix` declares.
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
