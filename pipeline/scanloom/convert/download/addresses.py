"""Addresses of models on the network, and the checksums that are published apart from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ZOO_LIST: Final = (
    "https://raw.githubusercontent.com/Project-MONAI/model-zoo/dev/models/model_info.json"
)
"""MONAI's model zoo: SHA-1 and address of the zip file, or of the repository, of each version."""
ZOO_BUNDLES: Final[Mapping[str, str]] = {
    "brats_mri_segmentation": "Apache-2.0",
    "multi_organ_segmentation": "non-commercial use, not to be passed on",
    "pancreas_ct_dints_segmentation": "Apache-2.0",
    "pediatric_abdominal_ct_segmentation": "Apache-2.0",
    "prostate_mri_anatomy": "Apache-2.0",
    "renalStructures_CECT_segmentation": "Apache-2.0",
    "renalStructures_UNEST_segmentation": "Apache-2.0",
    "segmentation_template": "MIT",
    "spleen_ct_segmentation": "Apache-2.0",
    "spleen_deepedit_annotation": "Apache-2.0",
    "swin_unetr_btcv_segmentation": "Apache-2.0",
    "ventricular_short_axis_3label": "MIT",
    "vista3d": "Apache-2.0; weights: NVIDIA, non-commercial use",
    "wholeBody_ct_segmentation": "Apache-2.0",
    "wholeBrainSeg_Large_UNEST_segmentation": "Apache-2.0",
}
"""Bundles of the zoo that can be named alone, with the licences in their folders: those that
scanloom reads. So a word that is meant as the name of a folder, with a typo or in another folder,
sends nothing to the network."""
HUGGING_FACE: Final = "https://huggingface.co"
ZOO_OWNER: Final = "MONAI"
"""Owner of the zoo's repositories on Hugging Face, which have the names of the bundles."""

BRAINCHOP: Final = "https://raw.githubusercontent.com/neuroneural/brainchop/4c87885f3a2a8835e260d521dcec922b58d91d41"
"""brainchop at one commit; models are in `public/models/NAME`."""
BRAINCHOP_LICENCE: Final = (
    "LICENSE",
    "53f9bf39e703ef346d556fe4e7be7d0f702f90bb8ff36bfed1fe9fabdd639e3e",
)
BRAINCHOP_MODELS: Final[Mapping[str, Mapping[str, str]]] = {
    "mindgrab": {
        "colormap.json": "b29809105747c752c889036bb953744cbd63b67f25b9c1b0657eaf00841fd1bf",
        "model.bin": "c9a01490fe2d13acc1515fd019b69db176ebe6f40c9b84aeb77f25acbc2ee0f3",
        "model.json": "24d1bcccba736a83c80b336ca349297f4839ae08b8ec92ec72c5d6adb9afe76e",
    },
    "model18cls": {
        "colormap.json": "10ebff5980dd2afe1a1407dd951d1258dfc95fec51641bab9b4a9b88d76808c5",
        "model.bin": "725096439f64ece1ca45ec3c5115c9fa6004f6538cac3032b85966d3772b605e",
        "model.json": "57346ac8b66ebe8d92296b1cf9988143be4949b6ef9695a790ef3d7fba3fb81b",
    },
    "model20chan3cls": {
        "colormap.json": "71f3ce5c5d9d0db1208937f55fa35b9970ce63c1a24753cf74c471fe9a3c27eb",
        "model.bin": "aecc03e3db596bfffab0ea1143f0848dbf4da4e317e04ef202986c6888cd467f",
        "model.json": "53932edad5330073bbac906049a31b84a2ca3d8c65d658feea848130004b984b",
    },
    "model21_104class": {
        "colormap.json": "a450db760609a91a38b3ff1810a465841c39b1ff138cab005071c897ad0da069",
        "group1-shard1of1.bin": "8a0aa1e2d94e5edc94c54aed900da978d2a1388bee4621cee05e473db64b84af",
        "model.json": "b80a9ac7dccaecc08d59a7f2285a1dce50305d317f505b437518773ab2b27446",
    },
    "model30chan18cls": {
        "colormap.json": "10ebff5980dd2afe1a1407dd951d1258dfc95fec51641bab9b4a9b88d76808c5",
        "model.bin": "7039651d91c4cee0b7b1ddfe93fe2f5cb9b71d99f5a126fdef407e2a36bb52d4",
        "model.json": "d28521c0965e452c371314e4b5b4dcef7b19aa91241b17ef894ac24952139701",
    },
    "model30chan50cls": {
        "colormap.json": "3895b0c40b1ef299bda68ac79bce6f1bbbb6e28d9dd990ef121402c08bc34645",
        "model.bin": "a7e597568dc7750c64cce8c64c4ca3ec7215716949efd741f19904da1baffa81",
        "model.json": "105db3a77c49fb3e7d59c6e9506981e13223b76dcd4c4b407640d422409e5353",
    },
    "model5_gw_ae": {
        "colormap.json": "36a45c1cc84ccb73482f3ad5a4d482da1f965e55c4b59f8f18d3649a8e7fd94d",
        "colormap3.json": "71f3ce5c5d9d0db1208937f55fa35b9970ce63c1a24753cf74c471fe9a3c27eb",
        "group1-shard1of1.bin": "ca0d1b8ff72f8719d9525acaf9a1f1cb66dbb173b4ee1d7540f99e022cf4bfd8",
        "model.json": "7aabd59933bd3528f120107165f5dd577c5b749cf91fc2f949987d7bc620ce59",
    },
}
"""SHA-256 of the files of each model: a TensorFlow.js layer model and its labels."""

TOTALSEGMENTATOR: Final = "https://github.com/wasserth/TotalSegmentator/releases/download"
"""TotalSegmentator's releases; their zip files have no published checksums."""
TOTALSEGMENTATOR_DATASETS: Final[Mapping[str, tuple[str, ...]]] = {
    "v2.0.0-weights": (
        "Dataset150_icb_v0",
        "Dataset258_lung_vessels_248subj",
        "Dataset260_hip_implant_71subj",
        "Dataset291_TotalSegmentator_part1_organs_1559subj",
        "Dataset292_TotalSegmentator_part2_vertebrae_1532subj",
        "Dataset293_TotalSegmentator_part3_cardiac_1559subj",
        "Dataset294_TotalSegmentator_part4_muscles_1559subj",
        "Dataset295_TotalSegmentator_part5_ribs_1559subj",
        "Dataset297_TotalSegmentator_total_3mm_1559subj",
        "Dataset298_TotalSegmentator_total_6mm_1559subj",
        "Dataset299_body_1559subj",
        "Dataset300_body_6mm_1559subj",
        "Dataset315_thoraxCT",
    ),
    "v3.0.0-weights": (
        "Dataset831_TotalSegmentator_part1_organs_1830subj",
        "Dataset832_TotalSegmentator_part2_vertebrae_1559subj",
        "Dataset833_TotalSegmentator_part3_cardiac_1830subj",
        "Dataset834_TotalSegmentator_part4_muscles_1830subj",
        "Dataset835_TotalSegmentator_part5_ribs_1559subj",
        "Dataset836_TotalSegmentator_total_3mm_1559subj",
        "Dataset837_TotalSegmentator_total_6mm_1559subj",
    ),
    "v2.3.0-weights": (
        "Dataset775_head_glands_cavities_492subj",
        "Dataset776_headneck_bones_vessels_492subj",
        "Dataset777_head_muscles_492subj",
        "Dataset778_headneck_muscles_part1_492subj",
        "Dataset779_headneck_muscles_part2_492subj",
    ),
    "v2.4.0-weights": (
        "Dataset008_HepaticVessel",
        "Dataset351_oculomotor_muscles_18subj",
    ),
    "v2.5.0-weights": (
        "Dataset113_ToothFairy3",
        "Dataset115_mandible",
        "Dataset117_lung_airways_arteries_veins_282subj",
        "Dataset305_vertebrae_discs_1559subj",
        "Dataset343_mediastinum_1786subj",
        "Dataset527_breasts_1559subj",
        "Dataset552_ventricle_parts_38subj",
        "Dataset570_ct_liver_segments",
        "Dataset576_mri_liver_segments_120subj",
        "Dataset589_ct_mri_liver_lesions_750subj",
        "Dataset591_ct_liver_lesions_842subj",
        "Dataset597_mri_body_139subj",
        "Dataset598_mri_body_6mm_139subj",
        "Dataset615_MAXIMUS",
        "Dataset756_mri_vertebrae_1076subj",
        "Dataset789_kidney_cyst_501subj",
        "Dataset803_TotalSegmentator_vertebrae_inner_1559subj",
        "Dataset850_TotalSegMRI_part1_organs_1088subj",
        "Dataset851_TotalSegMRI_part2_muscles_1088subj",
        "Dataset852_TotalSegMRI_total_3mm_1088subj",
        "Dataset853_TotalSegMRI_total_6mm_1088subj",
        "Dataset913_lung_nodules",
        "Dataset952_abdominal_muscles_167subj",
    ),
}
"""Zip files (nnU-Net datasets) of each release."""
TOTALSEGMENTATOR_TASKS: Final[Mapping[str, tuple[int, ...]]] = {
    "total_fast": (297,),
    "total_fastest": (298,),
    "total": (291, 292, 293, 294, 295),
    "total_v3_fast": (836,),
    "total_v3_fastest": (837,),
    "total_v3": (831, 832, 833, 834, 835),
    "total_mr_fast": (852,),
    "total_mr_fastest": (853,),
    "total_mr": (850, 851),
    "body_fast": (300,),
    "body": (299,),
    "body_mr_fast": (598,),
    "body_mr": (597,),
    "lung_vessels": (117, 297),
    "lung_vessels_legacy": (258, 298),
    "cerebral_bleed": (150, 298),
    "hip_implant": (260, 298),
    "vertebrae_mr": (756,),
    "pleural_pericard_effusion": (315, 298),
    "liver_vessels": (8, 298),
    "head_glands_cavities": (775, 298),
    "headneck_bones_vessels": (776, 298),
    "head_muscles": (777, 298),
    "headneck_muscles": (778, 779, 298),
    "oculomotor_muscles": (351, 298),
    "lung_nodules": (913, 298),
    "kidney_cysts": (789, 298),
    "breasts": (527,),
    "ventricle_parts": (552, 298),
    "liver_segments": (570, 298),
    "liver_segments_mr": (576, 852),
    "liver_lesions": (591, 297),
    "liver_lesions_mr": (589, 852),
    "craniofacial_structures": (115, 298),
    "abdominal_muscles": (952, 300),
    "teeth": (113, 115, 298),
    "trunk_cavities": (343,),
    "brain_aneurysm": (615,),
    "vertebrae_body": (305,),
}
"""Numbers of a task's datasets, and then of those of the rough models that crop the scan for it."""
TOTALSEGMENTATOR_CLEANED: Final = ("vertebrae_pp", "vertebrae_pp_refined")
"""Tasks that no card can express: code of their own changes labels after the networks."""
CLEANED_BY_SHAPE: Final = "cleaning of vertebrae by their shape"
TASK_FILE: Final = "totalsegmentator.json"
"""Optional file that names the task of a folder with weights: `{"task": "total_fast"}`."""
TOTALSEGMENTATOR_LICENSED: Final = frozenset(
    {
        "aorta_annulus",
        "aortic_dissection",
        "aortic_sinuses",
        "appendicular_bones",
        "appendicular_bones_mr",
        "brain_structures",
        "coronary_arteries",
        "coronary_arteries_legacy",
        "face",
        "face_mr",
        "heartchambers_highres",
        "pulmonary_artery_landmarks",
        "renal_arteries",
        "thigh_shoulder_muscles",
        "thigh_shoulder_muscles_mr",
        "tissue_4_types",
        "tissue_types",
        "tissue_types_mr",
    }
)
"""Tasks whose weights are given only to holders of a licence."""
FAMILIAR_NAMES: Final[Mapping[str, str]] = {
    "brain": "mindgrab",
    "spleen": "spleen_ct_segmentation",
    "totalsegmentator": "total",
}
"""Names that people try first, and the models that they mean."""


def known_names() -> set[str]:
    """Return all names of models that `known_request` resolves, without their collections."""
    models = (BRAINCHOP_MODELS, TOTALSEGMENTATOR_TASKS, ZOO_BUNDLES, FAMILIAR_NAMES)
    return {name for each in models for name in each}


def known_request(name: str) -> str | None:
    """Return the request by which `models add` gets the model of a name; None for other names.

    Parameters
    ----------
    name : str
        In upper or lower case, with its collection (`brainchop/NAME`) or without, or one of
        `FAMILIAR_NAMES`.
    """
    typed = name.lower()
    collection, _, model = FAMILIAR_NAMES.get(typed, typed).rpartition("/")
    for prefix, models in (
        ("brainchop", BRAINCHOP_MODELS),
        ("totalsegmentator", TOTALSEGMENTATOR_TASKS),
        ("monai", ZOO_BUNDLES),
    ):
        spelled = {each.lower(): each for each in models}
        if collection in ("", prefix) and model in spelled:
            # names of bundles are long enough to stand alone
            return spelled[model] if models is ZOO_BUNDLES else f"{prefix}/{spelled[model]}"
    return None
