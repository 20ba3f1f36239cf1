"""`verify` on models of transformers, and on models that return several tensors."""

import pytest
from torch import Tensor
from torch.nn import functional as F

import lss
from lss.models import GPT
from lss.verification import Report
from tests.faults.pretrained import CASES, PRETRAINED_FAULTS, Case
from tests.pretrained import make, predicts_next, told
from tests.ranks.test_transformers import DROPOUT
from tests.ranks.test_verify import target

RATES = DROPOUT | {"Gemma 3": {"attention_dropout": 0.1}}


def verified(name: str, kind: str, sequence: int, data: int = 1, fault: str = "nothing") -> Report:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = make(name, **RATES[name])
    batch, documents = told(kind)
    with PRETRAINED_FAULTS[fault]():
        return lss.verify(model, batch, mesh, documents=documents, shift_labels=int(predicts_next(model)))


@pytest.mark.parametrize("kind", ["whole", "padded left", "packed"])
@pytest.mark.parametrize("name", RATES)
def test_models_of_transformers_pass(ranks, name, kind):
    for sequence, data in ((2, 1), (3, 1), (2, 2))[: 3 if name == "BERT" else 2]:
        for report in ranks.run(verified, sequence * data, name, kind, sequence, data):
            assert report.passed, report.to_dict()
            assert "float64" in report.title
            assert max(check.error for check in report.checks) < 1e-13
            names = {(check.kind, check.name) for check in report.checks}
            assert {("output", "logits in training"), ("output", "logits in evaluation, joined")} <= names
            assert {("loss", "of step 2"), ("loss", "in evaluation"), ("loss, dropout", "of step 1")} <= names


def test_there_are_enough_faults():
    assert len({name for name, _ in CASES}) >= 20


@pytest.mark.parametrize(("fault", "case"), CASES, ids=[f"{name} {case.model} {case.batch}" for name, case in CASES])
def test_every_seeded_fault_is_caught_and_named(ranks, fault, case: Case):
    for report in ranks.run(verified, 2, case.model, case.batch, 2, 1, fault):
        assert case.failed in {check.kind for check in report.checks if not check.passed}
        assert report.first_forward == case.forward
        if case.failed != "output":  # what is before it holds
            assert all(check.passed for check in report.checks if check.kind == "output")


class Several(GPT):
    """Returns more than logits, in the form that is asked for; `mixed` looks at the number of tokens."""

    form = "mapping"

    def forward(self, tokens: Tensor) -> object:
        logits = super().forward(tokens)
        states = {"squares": (logits**2, [logits > 0]), "pooled": self.tokens.weight[:1]}
        if self.form == "mapping":
            return states | {"logits": logits, "nothing": None}
        mixed = logits * (3 if logits.size(1) < 9 else 2)  # which a trial on more tokens does not see
        return (logits, mixed if self.form == "mixed" else logits * 2)


class OwnLoss(GPT):
    """Works out a mean over the tokens that it is given."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> object:
        logits = super().forward(tokens)
        return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits) if labels is not None else logits


def several(form: str, kind: type[GPT] = Several) -> Report:
    mesh = lss.init_mesh(2, device="cpu")
    model, batch = target()
    model.__class__, model.form = kind, form
    return lss.verify(model, batch, mesh, shift_labels=0 if kind is OwnLoss else 1)


OUTPUTS = {"mapping": ["logits", "squares.0", "squares.1.0"], "tuple": ["0", "1"], "mixed": ["0", "1"]}


@pytest.mark.parametrize("form", OUTPUTS)
def test_every_output_of_tokens_is_compared(ranks, form):
    for report in ranks.run(several, 2, form):
        trained = {check.name: check.passed for check in report.checks if check.name.endswith(" in training")}
        assert trained == {f"{name} in training": (form, name) != ("mixed", "1") for name in OUTPUTS[form]}
        assert report.left_out == (("pooled",) if form == "mapping" else ())
        assert report.passed == (form != "mixed")


def test_a_loss_of_a_models_own_is_that_of_all_ranks(ranks):
    for report in ranks.run(several, 2, "", OwnLoss):
        assert report.passed, report.to_dict()


USER_MODULE = '''
import torch, transformers
from torch import nn

SHAPE = dict(vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)

def batch(**more):
    tokens = torch.randint(3, 31, (2, 9))
    return transformers.BatchEncoding({"input_ids": tokens, "labels": tokens.clone(), **more})

def llama():
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)), batch(attention_mask=mask)

def pooled():
    return transformers.BertModel(transformers.BertConfig(**SHAPE)), batch()

def dropping():
    shape = transformers.OPTConfig(vocab_size=31, hidden_size=32, ffn_dim=48, num_hidden_layers=1,
        num_attention_heads=4, word_embed_proj_dim=32, dropout=0.1)
    return transformers.OPTForCausalLM(shape), batch()

def too_large():
    model, given = llama()
    return model, {name: part + 100 * (name == "input_ids") for name, part in given.items()}

def unnamed():
    return llama()[0], torch.zeros(2, 9)

class Pools(nn.Module):
    """Tokens to one vector a sequence."""

    def __init__(self):
        super().__init__()
        from lss.models import GPT, GPTConfig
        self.inner = GPT(GPTConfig(16, 1, 2, vocabulary=31, max_length=9))

    def forward(self, input_ids):
        return {"pooled": self.inner(input_ids).mean(1)}

def pools():
    return Pools(), batch()
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)


def test_the_command_on_a_users_model(command, module):
    done = command("verify", "theirs:llama", "--sequence", "3")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM, 2 sequences of 9 tokens in 2 documents" in done.stdout
    done = command("verify", "theirs:llama", "--shift-labels", "0")
    assert done.returncode == 4
    assert "differs from the serial run" in done.stderr
    assert "say by shift_labels" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("function", "part"),
    {
        "pooled": "pooler makes one output of a whole sequence",
        "dropping": "drops values at a rate that is no nn.Dropout's",
        "too_large": "the plain model cannot be run on the batch: IndexError",
        "unnamed": "returned a tuple of LlamaForCausalLM, Tensor",
        "pools": "returned a dict without an output of tokens: pooled [2, 31]",
    }.items(),
)
def test_what_cannot_be_verified_is_refused_by_one_message(command, module, function, part):
    done = command("verify", f"theirs:{function}")
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert done.stderr.count("lss:") == 1, done.stderr
    assert "Traceback" not in done.stderr
