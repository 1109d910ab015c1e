"""Readers of traces, on small files that the tests write in the published formats."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi import InputError
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.traces import FORMATS, Skipped, read_trace

HEADER = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"


@pytest.fixture
def read(tmp_path):
    def write_and_read(text, name, **options):
        path = tmp_path / "trace"
        path.write_text(text)
        return read_trace(path, name, **options)

    return write_and_read


def test_tiresias(read):
    trace = read(
        HEADER + "1,8,30,133,vgg11,147,23\n0,1,0,606,vgg19,164.9,30\n\n2,2,30,5,x,7,1\n", "tiresias"
    )
    assert trace.jobs == (
        Job("0", 1, 0, 164, "vgg19"),
        Job("1", 8, 30, 147, "vgg11"),
        Job("2", 2, 30, 7, "x"),
    )
    assert trace.malformed == trace.without_gpus == ()


def test_muri_is_cut_to_seconds(read):
    header = "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval\n"
    trace = read(header + "0,4,1999,10,bert,4,927475999,11\n", "muri")
    assert trace.jobs == (Job("0", 4, 1, 927475, "bert"),)


def test_muri_has_stages_and_opportunistic_jobs(read):
    header = (
        "job_id,num_gpu,submit_time,duration,model_name,iteration_time,resource_time_0,"
        "resource_time_1,resource_time_2,priority\n"
    )
    rows = "0,4,0,9000,bert,190,0.5,163,18,1\n1,1,0,9000,dqn,490,446,8,0,0\n"
    first, second = read(header + rows, "muri").jobs
    assert (first.stages, first.iteration, first.priority) == ((500, 163_000, 18_000), 190_000, -1)
    assert (second.stages, second.priority) == ((446_000, 8_000, 0), 0)


def test_a_trace_of_your_own_has_owners_and_priorities(read):
    header = "job_id,num_gpu,submit_time,duration,owner,priority\n"
    jobs = read(header + "a,1,0,9,ann,5\nb,1,0,9,bob,-1\nc,1,0,9,,\n", "tiresias").jobs
    assert [(job.owner, job.priority) for job in jobs] == [("ann", 5), ("bob", -1), ("", 0)]
    with pytest.raises(InputError, match="line 2: priority is 'high', no whole number"):
        read(header + "a,1,0,9,ann,high\n", "tiresias")


def philly(jobid, submitted, *attempts):
    return {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": jobid,
        "attempts": [
            {
                "start_time": start,
                "end_time": end,
                "detail": [{"ip": f"m{i}", "gpus": ["gpu"] * n} for i, n in enumerate(gpus)],
            }
            for start, end, gpus in attempts
        ],
        "submitted_time": submitted,
        "user": "ce2f4c",
    }


def test_philly(read):
    log = [
        philly(
            "later",
            "2017-10-07 01:11:39",
            ("2017-10-07 01:12:09", "2017-10-07 01:13:23", [8]),
            ("2017-10-07 01:13:30", "2017-10-07 01:13:40", [8, 2]),
            ("2017-10-07 01:14:30", None, [8]),
        ),
        philly("first", "2017-10-07 00:00:00", ("2017-10-07 00:00:01", "2017-10-08 00:00:01", [1])),
        philly("killed", "2017-10-07 00:00:00"),
        philly("cpu", "2017-10-07 00:00:00", ("2017-10-07 00:00:01", "2017-10-07 00:00:02", [])),
    ]
    trace = read(json.dumps(log), "philly")
    assert trace.jobs == (
        Job("first", 1, 0, 86400, "ee9e8c", owner="ee9e8c"),
        Job("later", 10, 4299, 84, "ee9e8c", owner="ee9e8c"),
    )
    assert [row.line for row in trace.without_gpus] == [3, 4]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([], "it is a list, no object"),
        ({"attempts": []}, "jobid is None"),
        ({"jobid": "a", "attempts": 3}, "attempts is no list"),
        ({"jobid": "a", "attempts": [], "submitted_time": "today"}, "'today', no time"),
        (
            philly("a", "2017-10-07 00:00:00", ("2017-10-07 00:00:02", "2017-10-07 00:00:01", [1])),
            "before it starts",
        ),
        (
            {
                **philly("a", "2017-10-07 00:00:00"),
                "attempts": [
                    {
                        **{"start_time": "2017-10-07 00:00:00", "end_time": "2017-10-07 00:00:09"},
                        "detail": [{"ip": "m"}],
                    }
                ],
            },
            "lists no gpus",
        ),
    ],
)
def test_a_bad_philly_entry_is_numbered(read, entry, reason):
    good = philly("b", "2017-10-07 00:00:00", ("2017-10-07 00:00:00", "2017-10-07 00:00:05", [1]))
    with pytest.raises(InputError, match=f"line 2: .*{reason}"):
        read(json.dumps([good, entry]), "philly")
    trace = read(json.dumps([good, entry]), "philly", malformed="skip")
    assert [job.name for job in trace.jobs] == ["b"]
    assert trace.malformed[0].line == 2


def test_helios(read):
    text = (
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,"
        "queue\n"
        "11,u1,vcA,0,4,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:00,2020-04-01 00:00:09,"
        "9,0\n"
        "12,u1,vcB,16,96,2,FAILED,2020-04-01 00:01:05,2020-04-01 00:01:06,2020-04-01 00:01:16,"
        "10,1\n"
        "13,u2,vcA,1,6,1,COMPLETED,2020-04-01 00:00:05,2020-04-01 00:00:05,2020-04-01 01:00:05,"
        "3600,0\n"
    )
    trace = read(text, "helios")
    assert trace.jobs == (
        Job("13", 1, 0, 3600, "vcA", owner="vcA"),
        Job("12", 16, 60, 10, "vcB", owner="vcB"),
    )
    assert trace.without_gpus == (Skipped(2, "it asks for no GPU"),)


def test_pai_tasks_add_up_to_jobs(read):
    text = (
        "j1,worker,4,Terminated,1000.0,1600.0,600.0,29.0,100.0,MISC\n"
        "j1,ps,2,Terminated,990.0,1500.0,600.0,29.0,,CPU\n"
        "j1,chief,1,Terminated,995.0,1700.0,600.0,29.0,200.0,V100\n"
        "j2,tensorflow,1,Terminated,2000.0,2010.0,600.0,29.0,25.0,T4\n"
        "j3,tensorflow,1,Failed,2000.0,,600.0,29.0,25.0,T4\n"
    )
    trace = read(text, "pai")
    assert trace.jobs == (Job("j1", 6, 0, 705), Job("j2", 1, 1005, 10, compute=250))
    assert [row.line for row in trace.without_gpus] == [2, 5]
    header = (
        "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu\n"
    )
    assert read(header + text, "pai").jobs == trace.jobs


def test_pai_job_lists(read):
    text = (
        "job_id,num_inst,num_gpu,submit_time,duration,group\n"
        "a,2,1,5,70.5,g\nb,1,0.25,7,9,\nc,1,0,7,9,\n"
    )
    trace = read(text, "pai")
    assert trace.jobs == (Job("a", 2, 5, 70, "g"), Job("b", 1, 7, 9, compute=250))
    assert trace.without_gpus == (Skipped(4, "it asks for no GPU"),)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1,2,3\n", "3 fields instead of 7"),
        ("1,x,30,133,vgg11,147,23\n", "num_gpu is 'x', no number"),
        ("1,0,30,133,vgg11,147,23\n", "num_gpu is 0; it must be a whole number from 1"),
        ("1,1.5,30,133,vgg11,147,23\n", "num_gpu is 1.5; it must be a whole number from 1"),
        ("1,1,-30,133,vgg11,147,23\n", "submit_time is -30; it must be from 0"),
        ("1,1,30,133,vgg11,nan,23\n", "duration is nan; it must be from 0"),
        ("1,1,30,133,vgg11,1e300,23\n", "duration is 1e300"),
        ("1,1,30,133,vgg11,,23\n", "duration is '', no number"),
        (",1,30,133,vgg11,147,23\n", "job_id is empty"),
        ("0,1,30,133,vgg11,147,23\n", "job id '0' is that of line 2 too"),
    ],
)
def test_a_malformed_row_is_named_or_counted(read, row, reason):
    text = HEADER + "0,1,0,606,vgg19,164,30\n" + row + "9,1,0,606,vgg19,164,30\n"
    with pytest.raises(InputError) as caught:
        read(text, "tiresias")
    assert f"line 3: {reason}" in str(caught.value)
    assert "--malformed skip" in str(caught.value)
    trace = read(text, "tiresias", malformed="skip")
    assert [job.name for job in trace.jobs] == ["0", "9"]
    assert len(trace.malformed) == 1
    assert trace.malformed[0].line == 3
    assert reason in trace.malformed[0].reason


def test_out_of_order_ids_and_times_are_no_fault(read):
    text = HEADER + "9,1,50,1,m,5,1\n3,1,10,1,m,5,1\n7,1,10,1,m,5,1\n"
    assert [job.name for job in read(text, "tiresias").jobs] == ["3", "7", "9"]


def test_a_trace_without_jobs_is_empty(read):
    assert read(HEADER, "tiresias").jobs == ()
    assert read("[]", "philly").jobs == ()


def test_a_byte_order_mark_and_other_line_ends_are_no_fault(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + HEADER.replace("\n", "\r\n").encode() + b"0,1,0,1,m,5,1\r\n")
    assert len(read_trace(path, "tiresias").jobs) == 1


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"philly", "pai"}))
def test_a_file_of_another_format_says_what_it_lacks(read, name):
    with pytest.raises(InputError, match=r"it lacks .*another format"):
        read("a,b\n1,2\n", name)


def test_what_cannot_be_read_at_all_is_an_error(read, tmp_path):
    with pytest.raises(InputError, match="is no JSON"):
        read("{", "philly")
    with pytest.raises(InputError, match="a Philly log is a list"):
        read("{}", "philly")
    with pytest.raises(InputError, match="format of the trace is 'gavel'"):
        read("", "gavel")
    with pytest.raises(InputError, match="malformed is 'ignore'"):
        read("", "tiresias", malformed="ignore")
    with pytest.raises(InputError, match="cannot read trace"):
        read_trace(tmp_path / "absent.csv", "tiresias")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot read trace"):
        read_trace(tmp_path / "binary", "tiresias")
    with pytest.raises(InputError, match="line 2: a quote does not end"):
        read(HEADER + '0,"1\n1,1,0,1,m,5,1\n', "tiresias")


FIELDS = st.sampled_from(
    [*("", "0", "1", "-1", "2.5", "nan", "inf", "1e400", "x", '"', "é"), "2017-10-07 01:11:39"]
)
HEADERS = {
    "tiresias": HEADER,
    "muri": HEADER,
    "helios": "job_id,gpu_num,submit_time,duration\n",
    "pai": "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,x\n",
}


@pytest.mark.parametrize("name", HEADERS)
@given(rows=st.lists(st.lists(FIELDS, max_size=10), max_size=5))
def test_any_rows_are_jobs_or_listed(tmp_path_factory, name, rows):
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_text(HEADERS[name] + "".join(",".join(row) + "\n" for row in rows))
    trace = read_trace(path, name, malformed="skip")
    entries = len(trace.jobs) + len(trace.malformed) + len(trace.without_gpus)
    assert entries <= len(rows)
    if name != "pai":
        assert entries == sum(bool(",".join(row)) for row in rows)
    if trace.malformed:
        with pytest.raises(InputError, match="line"):
            read_trace(path, name)


@given(
    st.lists(
        st.recursive(
            FIELDS | st.none() | st.integers(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["jobid", "attempts", "submitted_time", "start_time", "end_time", "detail"]
                    ),
                    inner,
                    max_size=6,
                )
            ),
            max_leaves=12,
        ),
        max_size=4,
    )
)
def test_any_json_is_jobs_or_listed(tmp_path_factory, log):
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_text(json.dumps(log))
    trace = read_trace(path, "philly", malformed="skip")
    assert len(trace.jobs) + len(trace.malformed) + len(trace.without_gpus) == len(log)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "helios",
            "job_id,gpu_num,submit_time,duration,vc\n1,1,1969-01-01 00:00:00,5,v\n"
            "2,1,2020-04-01 00:00:00,5,v\n",
            2,
        ),
        (
            "philly",
            json.dumps(
                [
                    {
                        "jobid": str(year),
                        "submitted_time": f"{year}-01-01 00:00:00",
                        "attempts": [
                            {
                                "start_time": "2020-01-01 00:00:00",
                                "end_time": "2020-01-01 00:00:05",
                                "detail": [{"gpus": ["gpu0"]}],
                            }
                        ],
                    }
                    for year in (1969, 2020)
                ]
            ),
            1,
        ),
        (
            "pai",
            "job_id,num_inst,num_gpu,submit_time,duration\n1,9e15,9e15,5,5\n2,1,1,5,5\n",
            2,
        ),
        (
            "pai",
            "j1,worker,9e15,Terminated,1000.0,1600.0,600.0,29.0,9e15,MISC\n"
            "j2,worker,1,Terminated,1000.0,1600.0,600.0,29.0,100,MISC\n",
            1,
        ),
    ],
)
def test_a_job_that_cannot_be_is_named_or_counted(read, name, text, line):
    with pytest.raises(InputError, match=f"line {line}: .*must be between 0"):
        read(text, name)
    trace = read(text, name, malformed="skip")
    assert len(trace.jobs) == 1
    assert [row.line for row in trace.malformed] == [line]
