"""Correct a profile and an engine by what was measured of a served engine.

A step reads the weights and the K/V of decodes once, however many tokens it has, and computes in proportion to its
tokens. So the time of the smallest step and of decode attention has one factor, and the time of further tokens and of
prompts' attention has another one.
"""

from __future__ import annotations

from typing import NamedTuple

from xgpt.core.schema import CrossTimes, Curve, EngineSpec, LayerTimes, PlanDraft, Profile

SOURCE = "fitted to measured loads"


class Fit(NamedTuple):
    """Corrections of predicted times. The default changes nothing.

    Attributes:
        decode: factor on the time of the smallest step, and on attention of decodes.
        prefill: factor on the time of a step's further tokens, and on attention of prompts.
    """

    decode: float = 1.0
    prefill: float = 1.0
    step_s: float = 0.0
    path_s: float = 0.0

    @property
    def text(self) -> str:
        factors = f"prefill x{self.prefill:.3g}, decode x{self.decode:.3g}"
        return f"{factors}, {1e3 * self.step_s:.3g} ms a step, {1e3 * self.path_s:.3g} ms a request"

    def of_profile(self, profile: Profile) -> Profile:
        if (self.decode, self.prefill, self.step_s) == (1.0, 1.0, 0.0):
            return profile
        overhead = profile.overhead.but(seconds=tuple(self.step_s + s for s in profile.overhead.seconds))
        encoders = tuple(
            layer.but(rest=self._tokens(layer.rest), attention=layer.attention.times(self.prefill))
            for layer in profile.encoder_layers
        )
        return profile.but(
            layers=tuple(self._layer(layer) for layer in profile.layers),
            encoder_layers=encoders,
            embedding=self._tokens(profile.embedding),
            head=self._tokens(profile.head),
            overhead=overhead,
            provenance=profile.provenance | {"calibration": f"{self.text}, {SOURCE}"},
        )

    def of_engine(self, engine: EngineSpec) -> EngineSpec:
        if not self.path_s:
            return engine
        sources = engine.sources | {"before_admission_s": SOURCE}
        return engine.but(before_admission_s=engine.before_admission_s + self.path_s, sources=sources)

    def of_plan(self, plan: PlanDraft) -> PlanDraft:
        return plan if plan.engine is None else plan.but(engine=self.of_engine(plan.engine))

    def _tokens(self, curve: Curve) -> Curve:
        least = curve.seconds[0]
        return curve.but(
            seconds=tuple(self.decode * min(s, least) + self.prefill * max(s - least, 0.0) for s in curve.seconds)
        )

    def _layer(self, layer: LayerTimes) -> LayerTimes:
        cross = layer.cross
        if cross is not None:
            cross = CrossTimes(
                keys_values=cross.keys_values.times(self.prefill), attention=cross.attention.times(self.decode)
            )
        return layer.but(
            rest=self._tokens(layer.rest),
            last=None if layer.last is None else self._tokens(layer.last),
            encode_attention=layer.encode_attention.times(self.prefill),
            decode_attention=layer.decode_attention.times(self.decode),
            cross=cross,
            head=None if layer.head is None else self._tokens(layer.head),
        )
