"""``trace record`` on scripts with losses of every making: which step and which tag each gets."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracer
from tests.recording.launching.recorded_scripts import record, script


def test_losses_of_every_making(tmp_path: Path) -> None:
    """A loss module, a function imported by its own name, and one written by hand, scaled or not, are seen once a
    step.
    """
    body = """
    from torch.nn.functional import mse_loss
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    def step(loss):
        print(repr(float(loss.detach())))
        opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    step(nn.CrossEntropyLoss()(net(x), y))
    step(mse_loss(net(x), torch.zeros(20, 3)))
    step(((net(x) - 1) ** 2).mean())
    loss = net(x).abs().mean(); print(repr(float(loss.detach()))); opt.zero_grad(); loss.backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    printed = [float(line) for line in done.stdout.split()]
    with tracer.open(tmp_path / "run.zarr") as trace:
        recorded = [(m.global_step, m.call, float(m.data)) for m in trace.messages(kinds="loss") if m.data is not None]
    assert recorded == [(step, 0, loss) for step, loss in enumerate(printed)]


MODES = {
    "a second model, the first one in eval": """
    teacher = nn.Linear(4, 3); opt = torch.optim.SGD(teacher.parameters(), lr=0.1)
    F.cross_entropy(teacher(x), y).backward(); opt.step()
    teacher.eval()
    student = nn.Linear(4, 3); opt = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            t = teacher(x)
        opt.zero_grad(); F.kl_div(F.log_softmax(student(x), 1), F.softmax(t, 1), reduction="batchmean").backward()
        opt.step()
    """,
    "a look at another model between a forward and its loss": """
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (other, net)]
    for _ in range(3):
        out = net(x)
        with torch.no_grad():
            other(x)
        F.cross_entropy(out, y).backward()
        for opt in opts: opt.step()
    """,
    "another optimizer that trains no module, last": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    free = torch.zeros((), requires_grad=True); last = torch.optim.SGD([free], lr=0.1)
    for _ in range(3):
        F.cross_entropy(net(x) * free.detach().exp(), y).backward(); opt.step()
        opt.zero_grad(); (free.exp() - 2).square().backward(); last.step()
    """,
    "another optimizer that trains no module": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        delta = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.5)
        for _ in range(3):
            (-(net(x + delta) - 1).square().mean()).backward(); attack.step()
        opt.zero_grad(); F.cross_entropy(net(x + delta.detach()), y).backward(); opt.step()
    """,
}


@pytest.mark.parametrize("body", MODES.values(), ids=MODES)
def test_losses_and_steps_of_several_models(tmp_path: Path, body: str) -> None:
    """A loss is of the training where what it is made of was; and only what trains a model ends its steps."""
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        of_models = [one for one in trace.messages("loss") if one.leaf in ("", "student") and one.call == 0]
        leaves = ["", "student", "student"] if "student" in body else [""] * 3
        losses = [(one.global_step, one.leaf, one.tag) for one in of_models]
        assert losses == [(step, leaf, "default") for step, leaf in enumerate(leaves)]
        assert trace.info["steps"] == [0, 2]
        weights = [one.global_step for one in trace.messages("weights")]
    assert sorted(set(weights)) == [0, 1, 2]


def test_a_stage_of_a_pipeline_learns_shapes_before_it_trains(tmp_path: Path) -> None:
    """The forward and the loss by which it does so have tensors without values, and belong to no step."""
    body = """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    stage = PipelineStage(net, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    target = torch.zeros(len(x), 3)
    for k in range(3):
        losses = []
        opt.zero_grad(); schedule.step(x, target=target, losses=losses); opt.step()
        print("loss", *[one.item() for one in losses])
    dist.destroy_process_group()
    """
    done = record(tmp_path, "--profile", "standard", str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    printed = [[float(one) for one in line.split()[1:]] for line in done.stdout.splitlines() if "loss" in line]
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("loss", "loss_terms"):
            found = [(one.global_step, float(one.data)) for one in trace.messages(kind)]
            assert [step for step, _ in found] == [0, 0, 1, 1, 2, 2]
            assert [value for _, value in found] == pytest.approx([one for step in printed for one in step])
        outputs = [one.global_step for one in trace.messages("network_output_statistics")]
        assert outputs == [0, 0, 1, 1, 2, 2]
