"""Structures that models must find for the requested results."""

from scanloom.core.relations import CropBy, Relations, Share, StructuresOf, Unite

LIVER = StructuresOf("organs", ("liver",))


def test_results_that_depend_on_others_need_all_their_structures() -> None:
    dependent = (
        Relations(crop_by={"tumour": CropBy("organs", ("liver",))}),
        Relations(unite={"all": Unite((LIVER,))}),
        Relations(shares=(Share(("liver",)),)),
    )

    assert all(each.labels_to_compute(("spleen",)) == () for each in dependent)


def test_requested_structures_suffice_without_relations() -> None:
    for relations in (Relations(), Relations(ensembles={"mean": ("a", "b")})):
        assert relations.labels_to_compute(["spleen"]) == ("spleen",)
