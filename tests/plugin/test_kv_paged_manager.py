"""The fixture `kv_paged_manager`: sized by the test's profile, new for each test, and outside the matrix."""


def test_a_paged_manager_has_the_sizes_of_the_tests_profile(nested):
    result = nested(
        """
        from pytest_kvmock.engines import PagedCacheManager
        from pytest_kvmock.engines import PagedRequest

        def test_default(kv_paged_manager, kv_profile):
            assert isinstance(kv_paged_manager, PagedCacheManager)
            sizes = kv_paged_manager.total_blocks, kv_paged_manager.block_size
            assert sizes == (kv_profile.num_blocks, kv_profile.block_size) == (256, 16)
            assert kv_paged_manager.enable_prefix_caching

        @pytest.mark.kvmock(num_blocks=3, block_size=4, prefix_caching=False)
        def test_marked(kv_paged_manager):
            assert not kv_paged_manager.enable_prefix_caching
            request = PagedRequest("req-1", 0, 0.0, 13, 50)
            assert kv_paged_manager.allocate_blocks(request, 13) is None
            assert kv_paged_manager.allocate_blocks(request, 12) == [2, 1, 0]

        class TestOverridden:
            @pytest.fixture
            def kv_base_profile(self, kv_base_profile): return kv_base_profile.replace(num_blocks=7)

            def test(self, kv_paged_manager): assert kv_paged_manager.total_blocks == 7
        """,
        "-o",
        "kvmock_block_size=16",
    )

    result.assert_outcomes(passed=3)


def test_a_paged_manager_is_new_for_each_test_and_may_keep_blocks(nested):
    result = nested(
        """
        from pytest_kvmock.engines import PagedRequest

        @pytest.mark.parametrize("n", [1, 2])
        def test(kv_paged_manager, n):
            assert kv_paged_manager.num_free_blocks == 256
            kv_paged_manager.allocate_blocks(PagedRequest("req-1", 0, 0.0, 32, 50), 32)
        """
    )

    result.assert_outcomes(passed=2)


def test_kv_paged_manager_needs_no_matrix_and_no_harness(ids, nested):
    assert ids("def test(kv_paged_manager): pass") == ["test"]

    source = "def test(kv_paged_manager, request): print('has', [n for n in request.fixturenames if 'kv' in n])"
    nested(source, "-s").stdout.fnmatch_lines(["*has [[]'kv_paged_manager', 'kv_base_profile']*"])


def test_a_wrong_marker_is_an_error_at_setup(nested):
    result = nested(
        """
        import unittest

        @pytest.mark.kvmock(num_blocks=0)
        class Test(unittest.TestCase):
            def test(self): pass

            @pytest.fixture(autouse=True)
            def take(self, kv_paged_manager): pass
        """
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*num_blocks must be an integer of at least 1, got 0*"])
