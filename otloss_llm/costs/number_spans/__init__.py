"""The value of a whole number of several tokens: `NumberSpanCost` judges each of its tokens by what it makes of it."""

from otloss_llm.costs.number_spans._cost import SCALES as SCALES
from otloss_llm.costs.number_spans._cost import NumberSpanCost as NumberSpanCost
from otloss_llm.costs.number_spans._reading import writes_decimals as writes_decimals

__all__ = ["SCALES", "NumberSpanCost", "writes_decimals"]
