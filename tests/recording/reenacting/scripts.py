"""Training scripts that are recorded, and whose steps are run again."""

from __future__ import annotations

HEAD = """
import random, sys, numpy, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
random.seed(0), numpy.random.seed(0)
torch.set_num_threads(1)
"""
CNN = """
x, y = torch.randn(45, 1, 8, 8), torch.arange(45) % 4
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
criterion, limit = nn.CrossEntropyLoss(), float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
for epoch in range(10):
    model.train()
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(out := model(a), b)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        right = (out.argmax(1) == b).sum()
    model.eval()
    with torch.no_grad():
        criterion(model(x), y)
"""
TRANSFORMER = """
x = torch.randint(0, 11, (40, 6))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)
    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
for step in range(30):
    optimizer.zero_grad()
    rows = torch.randint(0, 40, (2, 5))
    for part in rows:  # accumulates gradients
        tokens = x[part]
        F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1)).div(2).backward()
    optimizer.step()
"""
NOISY = """
x, y = torch.randn(64, 6), torch.randn(64, 2)
body, head = nn.Linear(6, 8), nn.Linear(8, 2)
model = nn.Sequential(body, nn.Tanh(), nn.RReLU(), head)
first = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9, nesterov=True)
second = torch.optim.RMSprop(head.parameters(), lr=0.01, centered=True)
for step in range(30):
    rows = numpy.random.permutation(64)[: random.choice([4, 8])]
    noise = 0.1 * numpy.random.standard_normal((len(rows), 6)).astype("float32")
    first.zero_grad(), second.zero_grad()
    F.mse_loss(model(x[rows] + torch.from_numpy(noise)), y[rows]).backward()
    for one in model.parameters():
        one.grad.add_(torch.randn(one.shape), alpha=1e-3 * numpy.random.random() * random.random())
    first.step(), second.step()
    for group in second.param_groups:
        group["lr"] = 0.01 / (step + 2)
"""
LBFGS = """
x, y = torch.randn(24, 3), torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
for step in range(30):
    optimizer.step(closure)
"""
SCRIPTS = {"cnn": CNN, "transformer": TRANSFORMER, "noisy": NOISY, "lbfgs": LBFGS}
