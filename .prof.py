import sys, warnings; warnings.filterwarnings("ignore")
sys.path.insert(0,"benchmarks")
import mace, torch, time
from mace_scaling import build_model, quartz, timed, bare_model
from nvdd import Batch, DistributedModel, DomainConfig
from nvdd.communicator import Communicator
from nvdd.models.mace import MACEWrapper
from torch.profiler import profile, ProfilerActivity
dev=torch.device("cuda",0); dtype=torch.float32
w=MACEWrapper(build_model("128x0e + 128x1o",dtype).to(dev))
class A: warm_up=6; repeats=10
for cells in ((4,4,4),(11,11,11)):
    at=quartz(cells); b=Batch.from_atoms(at); m=DistributedModel(w,DomainConfig())
    t,_=timed(lambda: m(b),dev,6,10); print(len(at),"nvdd ms",1e3*t, {k:round(1e3*v,2) for k,v in m.timings.items()})
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as p:
        for _ in range(3): m(b); torch.cuda.synchronize()
    ev=p.key_averages()
    tot=sum(e.self_device_time_total for e in ev)/3e3
    print("device ms",tot)
    # idle: gaps on the device in one step
    ks=sorted([(e.time_range.start,e.time_range.end,e.name) for e in p.events() if str(e.device_type).endswith("CUDA")])
    span=0; end=None; gaps=[]
    for s,e,n in ks:
        if end is not None and s>end: gaps.append((s-end,n))
        end=max(end or e,e)
    print("gaps>50us, ms:", [(round(g/1e3,2),n[:40]) for g,n in sorted(gaps,reverse=True)[:12]], "sum", sum(g for g,_ in gaps)/3e3)
    bm=bare_model(w,at,dev,dtype,A); print("bare ms",1e3*bm[0])
    torch.cuda.empty_cache()
