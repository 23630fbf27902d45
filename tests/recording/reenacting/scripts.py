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
GAN = """
data = torch.randn(45, 6)
generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
makes = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
judges = torch.optim.Adam(critic.parameters(), lr=0.02)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(5):
    for (real,) in DataLoader(TensorDataset(data), 8, shuffle=True):
        judges.zero_grad()
        criterion(critic(real), torch.ones(len(real), 1)).backward()
        fake = generator(torch.randn(len(real), 3))
        criterion(critic(fake.detach()), torch.zeros(len(real), 1)).backward()
        judges.step()
        makes.zero_grad()
        criterion(critic(fake), torch.ones(len(real), 1)).backward()
        makes.step()
"""
OWN_LOSS = """
x, y = torch.randn(64, 6), torch.randn(64, 3)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(30):
    rows = torch.randint(0, 64, (8,))
    optimizer.zero_grad()
    ((model(x[rows]) - y[rows]) ** 2).mean().backward()
    optimizer.step()
"""
COMPILED = """
x, y = torch.randn(61, 6), torch.randint(0, 3, (61,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    for a, b in DataLoader(TensorDataset(x, y), 8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(compiled(a), b).backward()
        optimizer.step()
"""
LIGHTNING = """
import logging, warnings
import lightning
warnings.simplefilter("ignore")
lightning.seed_everything(0)
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, number):
        return F.cross_entropy(self(batch[0]), batch[1])
    def validation_step(self, batch, number):
        F.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
data = TensorDataset(torch.randn(45, 6), torch.randint(0, 3, (45,)))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=6, accelerator="cpu", gradient_clip_val=1.0, **quiet)
trainer.fit(Net(), DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
"""
TRAINER = """
import warnings
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
warnings.simplefilter("ignore")
sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=3, **sizes))
data = [{"input_ids": torch.randint(0, 30, (7,)), "labels": torch.randint(0, 3, ()).item()} for _ in range(45)]
quiet = dict(report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True)
arguments = TrainingArguments("out", num_train_epochs=5, per_device_train_batch_size=8, seed=0, **quiet)
Trainer(model, arguments, train_dataset=data).train()
"""
TWO_RANKS = """
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,)))
layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(data)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 6, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
dist.destroy_process_group()
"""
SHUFFLED = """
x, y = torch.randn(61, 6), torch.randn(61, 3)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
mean, some = sum(float(a.mean()) for a, _ in DataLoader(TensorDataset(x, y), 8)), next(iter(DataLoader(x, 4)))
for epoch in range(8):
    model.train()
    for a, b in DataLoader(TensorDataset(x, y), 8, shuffle=True):
        optimizer.zero_grad()
        ((model(a * 2 + 1) - b) ** 2).mean().backward()
        optimizer.step()
    model.eval()
    for a, b in DataLoader(TensorDataset(x, y), 16):
        model(a)
"""
WORKERS = """
x, y = torch.randn(61, 6), torch.randint(0, 3, (61,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, num_workers=2)
def ahead(batches):
    before = None
    for a, b in batches:
        after = a.double().float(), b
        if before is not None:
            yield before
        before = after
    yield before
for epoch in range(4):
    for number, (a, b) in enumerate(ahead(loader)):
        if number % 2 == 0:
            optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        if number % 2 == 1:
            optimizer.step()
"""
AUGMENTED = """
class Noisy(TensorDataset):
    def __getitem__(self, index):
        a, b = super().__getitem__(index)
        return a + 0.1 * torch.randn(6), b
x, y = torch.randn(400, 6), torch.randint(0, 3, (400,))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in DataLoader(Noisy(x, y), 8, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
"""
DATA_SETS = {"shuffled": SHUFFLED, "workers": WORKERS, "augmented": AUGMENTED}
"""Scripts whose DataLoaders give the datapoints in an order or in processes of their own."""
SCRIPTS = {
    "cnn": CNN, "transformer": TRANSFORMER, "noisy": NOISY, "lbfgs": LBFGS, "gan": GAN, "own loss": OWN_LOSS,
    "compiled": COMPILED, "lightning": LIGHTNING, "transformers": TRAINER, **DATA_SETS,
}  # fmt: skip
