"""Training objectives: what they read (`statistics`), their formulas (`formulas`) and their names (`names`)."""

from otloss_llm.objectives.formulas import EAFT as EAFT
from otloss_llm.objectives.formulas import EMO as EMO
from otloss_llm.objectives.formulas import GEM as GEM
from otloss_llm.objectives.formulas import MLE as MLE
from otloss_llm.objectives.formulas import ExpectedValue as ExpectedValue
from otloss_llm.objectives.formulas import LabelSmoothing as LabelSmoothing
from otloss_llm.objectives.formulas import MixCE as MixCE
from otloss_llm.objectives.formulas import NumberDistance as NumberDistance
from otloss_llm.objectives.formulas import NumberToken as NumberToken
from otloss_llm.objectives.formulas import Power as Power
from otloss_llm.objectives.formulas import TaiLr as TaiLr
from otloss_llm.objectives.formulas import WithNumbers as WithNumbers
from otloss_llm.objectives.formulas import ZLoss as ZLoss
from otloss_llm.objectives.names import parse_objective as parse_objective
from otloss_llm.objectives.statistics import Objective as Objective
from otloss_llm.objectives.statistics import Statistics as Statistics
from otloss_llm.objectives.statistics import Sum as Sum
from otloss_llm.objectives.statistics import Term as Term

# The formulas and parse_objective are public as otloss_llm.EMO, otloss_llm.parse_objective and so on.
__all__ = ["NumberDistance", "Statistics", "Sum", "Term", "WithNumbers"]
