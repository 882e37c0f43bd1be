from __future__ import annotations
import time
import pytest
from tests.sampling.conftest import World
from tests.sampling.continuations import sample_pairs
from tests.sampling.goodness import fit
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.plan import Plan

CASES=[
GenerationConfig(temperature=1.0,num_passes=0),
GenerationConfig(temperature=.5,num_passes=1),
GenerationConfig(temperature=1.5,num_passes=3,shortlist=3),
GenerationConfig(temperature=1.,num_passes=1,top_p=.8),
GenerationConfig(temperature=1.,num_passes=1,top_k=3),
GenerationConfig(temperature=1.,num_passes=1,min_p=.2),
GenerationConfig(temperature=1.,num_passes=1,repetition_penalty=1.3,presence_penalty=.4,frequency_penalty=.3),
GenerationConfig(temperature=1.,num_passes=1,draft_steps=2),
GenerationConfig(temperature=1.,num_passes=1,draft_steps=3),
GenerationConfig(temperature=1.5,drafter="autoregressive"),
GenerationConfig(temperature=.5,drafter="autoregressive"),
GenerationConfig(temperature=1.,drafter="lookup"),
GenerationConfig(temperature=1.,speculation="off"),
]
@pytest.mark.parametrize("config",CASES,ids=range(len(CASES)))
def test_pairs(refined_plan: Plan, refined: World, config: GenerationConfig) -> None:
    t=time.time();c=time.process_time()
    pairs=sample_pairs(refined_plan,config,200_000)
    probs=refined.truth.pairs(config)
    f=fit(pairs.counts,probs)
    print(config.temperature,pairs.acceptance,f,"wall",time.time()-t,"cpu",time.process_time()-c, "max p",probs.max(),(probs>0).sum())
    assert f.holds
