"""Tied embeddings between pipelines of any size, in the in-process API."""

from __future__ import annotations

from tests.spmd.pool import Pool
from tests.spmd.tied_cases import EMBEDDING, OUTPUT


def test_tied_embeddings_go_from_one_stage_to_two_and_back(pool: Pool) -> None:
    pool.run("tied_cases:one_to_two_stages_and_back")


def test_tied_and_untied_models_go_between_pipelines_of_any_size(pool: Pool) -> None:
    pool.run("tied_cases:between_pipelines", range(24), timeout=240)


def test_an_untied_source_is_refused_by_a_tied_target_by_name(pool: Pool) -> None:
    for said in pool.run("tied_cases:untied_into_tied"):
        assert all(EMBEDDING in each and OUTPUT in each and "tied" in each for each in said)


def test_one_parameter_and_one_memory_under_two_names_are_ties(pool: Pool) -> None:
    for said in pool.run("tied_cases:plain_modules"):
        assert "embed.weight" in said and "head.weight" in said and "tied" in said


def test_aliases_are_declared_in_the_call(pool: Pool) -> None:
    for said in pool.run("tied_cases:declared"):
        assert "no source has it" in said and "aliases of 'weight' are ()" in said
