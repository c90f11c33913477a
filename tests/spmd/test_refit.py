from __future__ import annotations

from collections.abc import Callable

from tests.spmd.pool import Pool


def test_the_collective_plan_is_the_pure_one(pool: Pool) -> None:
    pool.run("plan_is_the_pure_one", range(4))


def test_idle_ranks_take_part_without_transfers(pool: Pool) -> None:
    assert pool.run("idle_everywhere") == [(0, 0)] * pool.size


def test_every_rank_raises_what_stands_in_the_way_anywhere(pool: Pool) -> None:
    missing, broken, odd = pool.agreed("errors_reach_every_rank")

    assert "extra" in missing
    assert "partition_dim" in broken and "rank 3" in broken and "rank 5" in broken
    assert "rank 2: TypeError" in odd


def test_dtypes_that_differ_are_refused_by_name_unless_declared(pool: Pool) -> None:
    for said in pool.run("dtypes"):
        assert said.startswith("w: dtype is float32") and "bfloat16" in said


def test_strided_tensors_are_read_and_written_in_place(pool: Pool) -> None:
    pool.run("tensors_with_strides_of_their_own")


def test_every_dtype_travels_bit_for_bit(pool: Pool) -> None:
    pool.run("every_dtype")


def test_a_tensor_in_both_models_stays_or_is_refused(pool: Pool) -> None:
    for said in pool.run("one_tensor_in_both_models"):
        assert "shares memory" in said and said.count("rank") >= 1


def test_models_of_equal_sizes_never_share_a_plan(pool: Pool) -> None:
    pool.run("caches")


def test_a_target_may_number_its_own_world(pool: Pool) -> None:
    pool.run("ranks_of_two_worlds")


def test_wrappers_do_not_change_names(pool: Pool) -> None:
    pool.run("wrapped_models")


def test_a_transform_takes_over_its_parameters(pool: Pool) -> None:
    pool.run("transforms")


def test_a_transform_that_fails_on_one_rank_fails_everywhere(pool: Pool) -> None:
    for said in pool.run("failing_transform"):
        assert "rank 6: ValueError: no room" in said


def test_a_rank_that_does_not_come_is_named(small_pool: Callable[[int], Pool]) -> None:
    pool = small_pool(3)
    said = pool.run("too_few_come", 3.0, ranks=[0, 1])

    assert "not everyone came, missing rank 2" in said[0]
    assert "planning a refit" in said[1]


def test_a_rank_that_has_died_ends_the_wait_at_once(small_pool: Callable[[int], Pool]) -> None:
    pool = small_pool(4)
    pool.run("idle_everywhere")
    pool.kill(1)
    said = pool.run("too_few_come", 100.0, ranks=[0, 2, 3], timeout=60)

    assert said == ["planning a refit: rank 1 has left"] * 3


def test_a_run_ends_at_its_deadline_and_the_service_with_it(small_pool: Callable[[int], Pool]) -> None:
    """refitd.testing.conformance has what all services do."""
    ((said, is_usable),) = small_pool(2).run("service_waits_no_longer", 0.5, ranks=[0])

    assert "comparing transfers" in said and "0.5 s" in said
    assert "cannot be used again" in said and not is_usable


def test_dtensors_reach_tensor_parallel_models_and_back(pool: Pool) -> None:
    pool.run("dtensor_cases:fsdp_to_tensor_parallel_and_back")


def test_a_source_may_have_other_names_than_the_target(pool: Pool) -> None:
    pool.run("name_cases:a_source_under_other_names")
    said = pool.agreed("name_cases:names_that_say_nothing_of_a_tensor")
    assert "no rule of names matches other" in said
    said = pool.agreed("name_cases:a_vocabulary_padded_otherwise")
    assert "Padded('word_embeddings.weight', rows=N)" in said
    assert "if it has more, build it with the source's rows, or use client.register_target" in said
