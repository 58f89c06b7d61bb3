"""measured_peaks.csv: one measured memory value per row with everything known of the job."""

from __future__ import annotations

from benchmarks.accuracy.entries import UNITS, Answer, Entry, Question, compared, read_csv
from benchmarks.accuracy.jobs import fms, huggingface, liger, litgpt, mmseg, notebooks, video
from benchmarks.accuracy.jobs.base import Job

JOBS: dict[str, Job] = {
    **notebooks.JOBS, **huggingface.JOBS, **fms.JOBS, **video.JOBS, **liger.JOBS,
    **litgpt.JOBS, **mmseg.JOBS,
}  # fmt: skip
# Rows without a job: the beginning of their name -> why.
NOT_BUILT = {
    "nb_tfblock_a100_flash": "the state that earlier cells leave is not in the data",
    "fms_": "4-bit weights (bitsandbytes)",
    "litgpt_hub_": "sequence lengths of the first batch are not in the data",
    "torchtune_": "a row that adds one option after another; sequence length varies",
    "torchao_": "compiled model: Inductor decides what is kept",
    "mesa_": "the recipe's exponential average is only likely",
    "hfperf_": "device memory of nvidia-smi, with the context",
    "mmdet_": "a maximum over variable image shapes",
    "d2_": "a maximum over variable image shapes",
    "yolov5": "reserved memory that includes validation batches",
    "milabench_": "in the scaling table",
    "xmem_": "device memory of NVML, with the context",
    "hfsdpa_albert": "the configuration of albert-base-v1 is not bundled",
    "hfsdpa_": "inference of one image: what the process holds beside it is not in the data",
    "mmaction_": "the model's code is not written out here",
    "mmseg_": "the model's code is not written out here",
}


def why_not(row: str) -> str:
    if row in JOBS:
        return ""
    found = [reason for start, reason in NOT_BUILT.items() if row.startswith(start)]
    return found[0] if found else "no job is written for it"


def entries(name: str) -> list[Entry]:
    return [
        Entry(
            name, row["id"], row["family"], row["metric"], row["confidence"],
            JOBS[row["id"]].environment if row["id"] in JOBS else "", why_not(row["id"]),
            {"measured": round(float(row["value"]) * UNITS[row["unit"]])},
        )
        for row in read_csv("measured_peaks.csv")
    ]  # fmt: skip


def questions(entry: Entry) -> list[Question]:
    job = JOBS[entry.row]
    return [Question(job, job.batch)]


def solve(entry: Entry) -> Answer:
    job = JOBS[entry.row]
    e = job.estimate()
    predicted = job.measure(e, job.batch) if job.measure else e.peak(job.batch)
    moment = e.peak_moment(job.batch)
    low, high = e.peak_range(job.batch)
    return compared(
        entry.facts["measured"], predicted, low=low, high=high,
        reserved=e.reserved(job.batch), affine=e.affine,
        peak_at=f"{moment.phase} of step {moment.step}: {moment.operator} in {moment.module}",
    )  # fmt: skip
