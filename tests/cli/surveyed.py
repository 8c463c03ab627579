"""A survey made up for the tests of `regard inspect`: nothing is loaded, nothing computed."""

from regard.cli.inspect import Tools
from regard.cli.progress import STAGES
from tests.inspect.reports import report


def without_stages(err):
    """What stderr says besides the line of each stage."""
    stages = {f"regard: {name}\n" for name in (*STAGES.values(), "a stage of tomorrow")}
    return "".join(line for line in err.splitlines(keepends=True) if line not in stages)


class Surveyed:
    """Stands for loading and surveying; keeps what it was asked for."""

    def __init__(
        self, loads=lambda name: ("model", "tokenizer", "label"), raises=None, tokens=None, config=None, checks=None
    ):
        self.loads, self.raises, self.tokens = loads, raises, tokens
        self.config, self.checks = config, checks or (lambda *model, **asked: None)
        self.asked, self.options, self.surveyed, self.devices = None, {}, [], []

    def __call__(self):
        return Tools(self.load, self.survey, lambda name: self.config, self.checks)

    def load(self, name, *, device):
        self.devices.append(device)
        return self.loads(name)

    def survey(self, model, tokenizer, text, *, progress, **options):
        self.asked, self.options = (model, tokenizer, text), options
        self.surveyed.append(model)
        progress("prompt", 0, 1)
        progress("prompt", 1, 1)
        progress("a stage of tomorrow", 1, 3)
        if self.raises is not None:
            raise self.raises
        return report(tokens=self.tokens, close_ups=options["heads"] or (), ablated=options["ablate"] is not None)
