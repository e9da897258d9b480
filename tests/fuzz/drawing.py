"""Makes a program from a seed: a small model, optimizers with options, and what people do between and within steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from .known import is_known
from .program import (
    Action,
    AddParam,
    Backward,
    Collective,
    Consolidate,
    Freeze,
    Join,
    Param,
    Program,
    Ranks,
    Read,
    Reload,
    SetGrad,
    SetRate,
    Step,
    Term,
    Wrapped,
    ZeroGrad,
)

_SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (1,), (), (5,), (4, 2), (0,), (17,), (40, 8)]
_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.125}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": False}),
    ("Adagrad", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("NAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("ASGD", {"lr": 0.05}),
    ("Adadelta", {"lr": 0.5}),
    ("RAdam", {"lr": 0.01}),
]
_FOR_SPARSE = [("SGD", {"lr": 0.125}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.1})]
_CASTS = ["fp16", "bf16"]
_CODECS = [
    "int8",
    "int4",
    "topk(0.3)",
    "powersgd(rank=1, start_step=0, min_ratio=1.0)",
    "powersgd(rank=2, start_step=2)",
]


def draw_program(seed: int, size: int, shard: float = 0.3) -> Program:
    """Returns the program of a seed, for so many ranks; ``shard`` is how many of the optimizers divide their work."""
    return _Draw(seed, size, shard).program()


@dataclass
class _Plan:
    """What an optimizer is like, while a program is drawn."""

    wrapped: Wrapped
    passes: int
    params: list[str] = field(default_factory=list)


class _Draw:
    """Draws one program."""

    def __init__(self, seed: int, size: int, shard: float) -> None:
        self._seed, self._size, self._shard = seed, size, shard
        self._dice = random.Random(f"{seed} at {size}")
        # Another one, so that all else of a program is the same with and without.
        self._shard_dice = random.Random(f"{seed} at {size}, shard")
        self._params: list[Param] = []
        self._plans: list[_Plan] = []
        self._actions: list[Action] = []
        self._batch = 100
        self._added = 0
        self._frozen: dict[str, bool] = {}
        self._is_apart = False

    def program(self) -> Program:
        dice = self._dice
        members = None
        if self._size > 2 and dice.random() < 0.1:
            members = tuple(sorted(dice.sample(range(self._size), self._size - 1)))
            self._is_apart = True
        count = 2 if dice.random() < 0.25 else 1
        has_sparse = dice.random() < 0.15
        for of in range(count):
            self._optimizer(of, has_sparse=has_sparse)
        steps = dice.randint(2, 5)
        for step in range(steps):
            self._one_step(step)
        first = self._plans[0]
        divided = [of for of, plan in enumerate(self._plans) if plan.wrapped.option("shard")]
        self._actions += [Consolidate(of) for of in divided]
        # The threads in which ranks here sit out have no world, which a changed optimizer asks for.
        can_join = count == 1 and not self._is_apart and not self._added and not divided
        if can_join and dice.random() < 0.1 and not is_known("join"):
            self._join(first)
        return Program(
            self._size,
            tuple(self._params),
            tuple(plan.wrapped for plan in self._plans),
            tuple(self._actions),
            members,
            self._seed,
        )

    def _chance(self, of: float) -> bool:
        return self._dice.random() < of

    def _new_batch(self) -> int:
        self._batch += 1
        return self._batch

    # -- model and optimizers

    def _optimizer(self, of: int, *, has_sparse: bool) -> None:
        dice = self._dice
        kind, arguments = dice.choice(_FOR_SPARSE if has_sparse else _KINDS)
        options: dict[str, Any] = {}
        scaler = None
        passes = dice.choice([1, 1, 1, 2, 3])
        if passes > 1:
            options["backward_passes_per_step"] = passes
        op = dice.choices(["Average", "Sum", "Adasum"], [8, 1, 1])[0]
        # Where changes have the same size on all ranks they may cancel out, and then Adasum is not continuous.
        if op == "Adasum" and (has_sparse or kind != "SGD"):
            op = "Average"
        dtypes = self._dtypes()
        # Their constants against a division by zero are zero in float16.
        if kind != "SGD" and "float16" in dtypes:
            dtypes = ["float32"]
        if op != "Average":
            options["op"] = f"hvd.{op}"
        if op != "Adasum" and self._chance(0.15) and "float16" not in dtypes:
            scaler = dice.choice([4.0, 64.0])
        self._compression(options, op)
        self._sending(options, op, scaler)
        schedule = 0.5 if self._chance(0.1) else None
        names = [self._param(dtypes, has_sparse=has_sparse) for _ in range(dice.randint(1, 5))]
        groups = [names]
        if len(names) > 1 and self._chance(0.4):
            cut = dice.randint(1, len(names) - 1)
            groups = [names[:cut], names[cut:]]
        if len(names) > 1 and self._chance(0.15):
            options["groups"] = dice.choice([2, tuple(tuple(names[i : i + 2]) for i in range(0, len(names), 2))])
        kind, arguments = self._divide(kind, arguments, options, dtypes, has_sparse=has_sparse)
        wrapped = Wrapped(
            kind, tuple(arguments.items()), tuple(map(tuple, groups)), tuple(options.items()), scaler, schedule
        )
        self._plans.append(_Plan(wrapped, passes, list(names)))

    def _divide(
        self, kind: str, arguments: dict[str, Any], options: dict[str, Any], dtypes: list[str], *, has_sparse: bool
    ) -> tuple[str, dict[str, Any]]:
        """Adds ``shard`` to the options, and leaves away what it refuses; returns the optimizer and its arguments."""
        dice = self._shard_dice
        if dice.random() > self._shard or "Adasum" in options.get("op", ""):
            return kind, arguments
        options["shard"] = dice.choice(["world", "world", "host"])
        options.pop("step_on_arrival", None)
        if has_sparse:
            options["sparse_as_dense"] = True
        # Those that are divided by whole parameters.
        if dice.random() < 0.2:
            return "Normed", {"lr": 0.1}
        if dice.random() < 0.1 and not has_sparse and set(dtypes) <= {"float32", "float64"}:
            return "Adafactor", {"lr": 0.01}
        return kind, arguments

    def _dtypes(self) -> list[str]:
        return self._dice.choice(
            [
                ["float64"],
                ["float64"],
                ["float32"],
                ["float32"],
                ["float32", "float64"],
                ["bfloat16", "float32"],
                ["float16"],
                ["complex64", "float32"],
                ["complex128", "float64"],
            ]
        )

    def _compression(self, options: dict[str, Any], op: str) -> None:
        dice = self._dice
        if op == "Average" and self._chance(0.08):
            options["exchange"] = "Mean"
        elif self._chance(0.2):
            options["compression"] = f"hvd.Compression.{dice.choice(_CASTS)}"
        elif op != "Adasum" and self._chance(0.3) and not is_known("codecs"):
            options["compression"] = f"hvd.Compression.{dice.choice(_CODECS)}"

    def _sending(self, options: dict[str, Any], op: str, scaler: float | None) -> None:
        dice = self._dice
        if self._chance(0.6):
            options["bucket_cap_mb"] = dice.choice([0.00001, 0.00005, 0.0002, 0.002])
        if self._chance(0.15):
            options["sparse_as_dense"] = True
        if op == "Average" and "exchange" not in options and self._chance(0.1):
            options["gradient_predivide_factor"] = dice.choice([2.0, 1.5])
        if op != "Adasum" and self._chance(0.1):
            options["step_on_arrival"] = True
        elif op != "Adasum" and self._chance(0.1):
            options["max_norm"] = dice.choice([0.5, 10.0])
        del scaler

    def _param(self, dtypes: list[str], *, has_sparse: bool) -> str:
        dice = self._dice
        name = f"w{len(self._params)}"
        dtype, kind, shape = dice.choice(dtypes), "plain", dice.choice(_SHAPES)
        if has_sparse and self._chance(0.5) and dtype != "float16" and not dtype.startswith("complex"):
            kind, shape = "sparse", dice.choice([(6, 2), (10, 3)])
        elif self._chance(0.1):
            kind, shape = "channels_last", (2, 3, 2, 2)
        elif self._chance(0.1):
            kind, shape = "transposed", (3, 4)
        param = Param(name, shape, dtype, kind, frozen=self._chance(0.1))
        self._params.append(param)
        self._frozen[name] = param.frozen
        return name

    # -- steps

    def _one_step(self, step: int) -> None:
        dice = self._dice
        order = list(range(len(self._plans)))
        for of in order:
            plan = self._plans[of]
            # With two optimizers most gradients that are not dropped are an error.
            never = 1 if len(self._plans) == 1 else 0.3
            zeroes = dice.choices(["before", "after", "never"], [6, 2, never])[0]
            weighs = self._can_weigh(plan) and self._chance(0.1)
            if step and (zeroes == "before" or weighs):
                self._zero(of)
            self._between(of, is_within=False)
            how = self._how(plan)
            count = plan.passes
            is_odd = self._chance(0.15) and not self._must_be_complete(plan)
            if is_odd:
                count = dice.choices([0, 1, max(1, plan.passes - 1), plan.passes + 1], [2, 4, 4, 1])[0]
            inside = None
            for number in range(count):
                no_sync = self._chance(0.05) or (is_odd and self._chance(0.3))
                extra = self._backward(of, weighs=weighs, is_odd=is_odd, no_sync=False)
                if no_sync:
                    self._actions.append(self._backward(of, weighs=weighs, is_odd=is_odd, no_sync=True))
                if how == "closure" and number == count - 1:
                    inside = extra
                else:
                    self._actions.append(extra)
                if self._chance(0.15):
                    self._between(of, is_within=True)
            if how == "closure" and inside is None:
                how = "plain"
            self._actions.append(Step(of, how, inside))
            if zeroes == "after":
                self._zero(of)

    @staticmethod
    def _must_be_complete(plan: _Plan) -> bool:
        return plan.wrapped.scaler is not None and is_known("a scaler in a step that is not complete")

    def _can_weigh(self, plan: _Plan) -> bool:
        options = dict(plan.wrapped.options)
        return (
            "op" not in options
            and "exchange" not in options
            and not self._is_apart
            and plan.wrapped.scaler is None
            and len(self._plans) == 1
            # The first step's wires, of losses that are divided by 1024, are too small for it.
            and "fp16" not in options.get("compression", "")
            and all(param.dtype != "float16" for param in self._params_and_added())
        )

    def _how(self, plan: _Plan) -> str:
        options = dict(plan.wrapped.options)
        is_adasum = "Adasum" in options.get("op", "")
        can_clip = all(self._kind_of(name) != "sparse" for name in plan.params)
        if plan.wrapped.scaler is not None:
            return (
                self._dice.choice(["scaler", "scaler", "unscale", "synchronize and unscale"]) if can_clip else "scaler"
            )
        ways = ["plain"] * 6
        if not is_adasum:
            ways += ["synchronize", "twice"] + ["clip"] * can_clip
        if not options.get("step_on_arrival") and not (is_adasum and is_known("Adasum with a closure")):
            ways += ["closure"]
        return self._dice.choice(ways)

    def _kind_of(self, name: str) -> str:
        return next(param.kind for param in self._params_and_added() if param.name == name)

    def _params_and_added(self) -> list[Param]:
        return [*self._params, *(action.param for action in self._actions if isinstance(action, AddParam))]

    def _some_ranks(self) -> Ranks:
        if self._chance(0.8):
            return None
        return tuple(sorted(self._dice.sample(range(self._size), self._dice.randint(1, self._size - 1))))

    def _backward(self, of: int, *, weighs: bool, is_odd: bool, no_sync: bool) -> Backward:
        dice = self._dice
        plan = self._plans[of]
        batch = self._new_batch()
        is_complete = self._must_be_complete(plan)
        names = [name for name in plan.params if is_complete or self._chance(0.85)] or [plan.params[0]]
        if len(self._plans) > 1 and self._chance(0.4) and not is_known("surplus gradients"):
            other = self._plans[1 - of]
            names += [name for name in other.params if self._chance(0.7)]
        terms = []
        for name in names:
            factor = None
            if plan.wrapped.scaler is not None and self._chance(0.05):
                factor = dice.choice(["inf", "nan"])
            ranks = None if weighs or self._must_be_complete(plan) else self._some_ranks()
            times = 2 if self._chance(0.15) else 1
            terms.append(Term(name, batch * 10 + len(terms), ranks, times, factor))
        if is_odd and not weighs and not self._must_be_complete(plan) and self._chance(0.3):
            ranks = self._some_ranks()
            terms = [Term(term.param, term.batch, ranks, term.times, term.factor) for term in terms]
        weighted = None
        if weighs:
            weighted = (of, tuple(dice.choice([0, 1, 2, 5, 8]) for _ in range(self._size)))
        scaled = of if plan.wrapped.scaler is not None else None
        return Backward(tuple(terms), (of,) if no_sync else (), scaled, weighted)

    def _zero(self, of: int) -> None:
        if self._chance(0.75):
            self._actions.append(ZeroGrad(of, self._chance(0.75)))
        else:
            self._actions.append(ZeroGrad(None, self._chance(0.75)))

    def _between(self, of: int, *, is_within: bool) -> None:
        dice = self._dice
        plan = self._plans[of]
        name = dice.choice(plan.params)
        if plan.wrapped.option("shard") and not is_within and self._shard_dice.random() < 0.15:
            self._actions.append(Consolidate(of, loads=self._shard_dice.random() < 0.5))
        if self._chance(0.12) and not (is_within and self._must_be_complete(plan)):
            self._frozen[name] = not self._frozen[name]
            if not (is_within and not self._frozen[name] and is_known("unfreezing within a step")):
                self._actions.append(Freeze(name, self._frozen[name]))
        if self._chance(0.06) and self._kind_of(name) != "sparse" and not is_known("gradients by hand"):
            how = dice.choice(["replace", "replace", "add", "in place", "none"])
            self._actions.append(SetGrad(name, self._new_batch(), how, self._some_ranks()))
        if self._chance(0.04) and self._added < 2 and not (is_within and self._must_be_complete(plan)):
            self._add(of)
        if self._chance(0.06):
            self._reload(of, is_within=is_within)
        if self._chance(0.06):
            ranks = None if is_known("reading on one rank") else (dice.randrange(self._size),)
            self._actions.append(Read(of, dice.choice(["groups", "groups", "state", "repr", "state_dict"]), ranks))
        if self._chance(0.06):
            self._actions.append(SetRate(of, dice.choice(["wrapper", "inner"])))
        if self._chance(0.05):
            self._actions.append(Collective(self._new_batch()))
        if is_within and self._chance(0.06):
            self._zero(of)

    def _add(self, of: int) -> None:
        plan = self._plans[of]
        ways = ["wrapper"]
        if not is_known("param_groups changed behind the wrapper"):
            ways += ["inner", "append", "group", "replace"]
        how = self._dice.choice(ways)
        if how == "append" and plan.wrapped.schedule is None and len(plan.params) == 0:
            return
        name = f"n{self._added}"
        self._added += 1
        dtype = next(param.dtype for param in self._params_and_added() if param.name == plan.params[0])
        if how == "replace":
            plan.params[0] = name
        else:
            plan.params.append(name)
        self._frozen[name] = False
        self._actions.append(AddParam(of, Param(name, self._dice.choice([(2,), (3, 2)]), dtype), how))

    def _reload(self, of: int, *, is_within: bool) -> None:
        if self._plans[of].wrapped.option("shard") and self._plans[of].wrapped.kind in ("NAdam", "ASGD"):
            # PyTorch's load_state_dict casts their scalars, and a rank's own part is loaded as it was.
            return
        how = self._dice.choice(["state", "deepcopy", "pickle"])
        if how != "state" and (
            self._plans[of].wrapped.schedule is not None
            or self._plans[of].wrapped.option("shard")
            or self._plans[of].wrapped.scaler is not None
            or self._is_apart
            or "exchange" in dict(self._plans[of].wrapped.options)
            or (is_within and is_known("copies in the middle of a step"))
        ):
            how = "state"
        self._actions.append(Reload(of, how))

    def _join(self, plan: _Plan) -> None:
        if "Adasum" in str(plan.wrapped.option("op")):
            return
        name = self._dice.choice(plan.params)
        steps = tuple(self._dice.randint(0, 3) for _ in range(self._size))
        if self._frozen[name]:
            return
        self._actions.append(ZeroGrad(0))
        self._actions.append(Join(0, name, 10 * self._new_batch(), steps, self._dice.choice(["all", "active"])))
