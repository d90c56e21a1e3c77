"""Small random checkpoints as `transformers` saves them."""

import pytest
import torch
import transformers

OPT_SHAPES = {
    "tied": {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 256, "num_hidden_layers": 2},
    "untied-odd": {
        "hidden_size": 60,
        "num_attention_heads": 3,
        "ffn_dim": 101,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "gelu": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "ffn_dim": 77,
        "num_hidden_layers": 1,
        "activation_function": "gelu",
    },
}


@pytest.fixture(scope="session", params=sorted(OPT_SHAPES))
def opt_checkpoint(request, tmp_path_factory):
    """(directory, the transformers model that was saved there); weights large enough to tell tokens apart."""
    return save_opt(tmp_path_factory.mktemp(request.param), OPT_SHAPES[request.param])


@pytest.fixture(scope="session")
def small_opt(tmp_path_factory):
    return save_opt(tmp_path_factory.mktemp("small"), OPT_SHAPES["tied"])


def save_opt(directory, shape):
    config = transformers.OPTConfig(
        vocab_size=211,
        max_position_embeddings=128,
        word_embed_proj_dim=shape["hidden_size"],
        dropout=0.0,
        **shape,
    )
    torch.manual_seed(7)
    model = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.6 * weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1)
            else:
                weight.uniform_(0.8, 1.2)
    model.save_pretrained(directory)
    return directory, model
