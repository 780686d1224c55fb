"""What official sources set for each preset of configs/algorithm, and where the preset differs from it and why.

`PUBLISHED[preset]`: key -> (published value, repository, file and line). `DEVIATIONS[preset]`: key -> (the preset's
value, reason). `OWN[preset]`: key that the preset sets and for which nothing was published -> reason. Each of
`OBLIGATORY` is in one of `PUBLISHED`, `OWN` and `UNSET`, which says of a key that the preset leaves alone why not.
"""

import published_gradients
import published_noised_images
import published_policy_gradients

TABLES = (published_policy_gradients, published_noised_images, published_gradients)
OBLIGATORY = ("sampling.guidance_scale", "rollout.n", "rollout.prompts_per_step", "actor.lr")

# of the lines that are cited
COMMITS = {
    "Fredreic1849/BranchGRPO": "19fbb9f",
    "Luo-Yihong/DGPO": "01ceb4b",
    "NVlabs/DiffusionNFT": "24af555",
    "NVlabs/finite-difference-flow-optimization": "740e22f",
    "RuoyuWang-2077/FlowBP": "93b220a",
    "SalesforceAIResearch/DiffusionDPO": "5233e75",
    "Shredded-Pork/TempFlow-GRPO": "63e4def",  # of config/dgx.py; the scripts and the sampler are of e66824e
    "THUDM/ImageReward": "c1392c6",
    "Tencent-Hunyuan/MixGRPO": "e5cdd6a",
    "Tencent-Hunyuan/SRPO": "81e5898",
    "Tencent-Hunyuan/UniRL": "1a7b501",
    "X-GenGroup/Flow-Factory": "a0b2bc5",
    "XueZeyue/DanceGRPO": "15cc71d",
    "jacklishufan/diffusion-kto": "226bbd0",
    "kvablack/ddpo-pytorch": "1958463",
    "mihirp1998/AlignProp": "b22918a",
    "nvidia-cosmos/cosmos-rl": "89f2e5b",
    "scxue/advantage_weighted_matching": "be51372",
    "verl-project/verl-omni": "a1139ba",
    "vvvvvjdy/dmdr": "061dc29",
    # the DPO and SFT files are of ac4c86e, config/grpo_guard.py as zhtmike/flow_grpo has it in 2e2f712
    "yifan123/flow_grpo": "31c71b9",
}

# without code by their authors, or of which only a README could be read (zh-ding/TreeGRPO)
PAPERS = {
    "draft": "arXiv 2309.17400",
    "dense_grpo": "arXiv 2601.20218",
    "neighbor_grpo": "arXiv 2511.16955",
    "tree_grpo": "arXiv 2512.08153",
    "rwr": "arXiv 2302.12192",
}

GERLS_OWN = {"awm_fast", "few_step_grpo", "flow_ppo", "guidance_distillation", "mixed_gradient"}

PUBLISHED = {preset: rows for table in TABLES for preset, rows in table.PUBLISHED.items()}
DEVIATIONS = {preset: rows for table in TABLES for preset, rows in table.DEVIATIONS.items()}
OWN = {preset: rows for table in TABLES for preset, rows in table.OWN.items()}
UNSET = {preset: rows for table in TABLES for preset, rows in table.UNSET.items()}
