//! Executors with several threads.

use std::thread;
use std::time::Duration;

use super::support::{Count, Graph, HANG, Log, run_all, sum};
use crate::error::Problem;
use crate::schedule::executor::ExecutorSettings;
use crate::schedule::{ReceiveMode, Transfers};

fn settings(receive: ReceiveMode) -> ExecutorSettings {
    ExecutorSettings { receive, window: 2, deadline: HANG, threads: 3 }
}

#[test]
fn nodes_that_need_no_other_one_run_at_the_same_time() {
    for mode in [ReceiveMode::PollingAsync, ReceiveMode::Callback] {
        let mut graph = Graph::default();
        let (begun, threads) = (Count::default(), Log::default());
        let input = graph.input("input", 0);
        let mut three = Vec::new();
        for at in 0..3 {
            let (begun, threads) = (begun.clone(), threads.clone());
            three.push(graph.node_with(&format!("one of three {at}"), 1, &[input], move |step, inputs| {
                begun.add();
                threads.add(format!("{:?}", thread::current().name()));
                // Ends only if the other two have begun, too.
                begun.wait_for(3 * (step + 1))?;
                sum(step, inputs)
            }));
        }
        let joined = graph.sum("joined", 1, &three);
        graph.result(joined);
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 2).unwrap();
        let mut executors = split.executors(transfers, &settings(mode));
        for (part, (report, seen)) in run_all(&mut executors, 4).into_iter().enumerate() {
            let report = report.unwrap_or_else(|error| panic!("{mode}, part {part}: {error}"));
            assert_eq!(report.late, 0, "a waker was not woken: {report:?}");
            assert_eq!(seen.results.len(), if part == 1 { 4 } else { 0 });
        }
        let all = threads.lines().into_iter().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(all.len(), 3, "{mode}: {all:?}");
        assert!(all.iter().all(|name| name.contains("graph-nodes-")), "{all:?}");
    }
}

#[test]
fn a_kernel_that_runs_for_longer_than_the_deadline_is_no_error() {
    let mut graph = Graph::default();
    let input = graph.input("input", 0);
    let slow = graph.node_with("slow", 0, &[input], |step, inputs| {
        thread::sleep(Duration::from_millis(300));
        sum(step, inputs)
    });
    graph.result(slow);
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
    let settings =
        ExecutorSettings { deadline: Duration::from_millis(50), ..settings(ReceiveMode::PollingAsync) };
    let mut executors = split.executors(transfers, &settings);
    let (report, seen) = run_all(&mut executors, 1).remove(0);
    assert!(report.is_ok() && seen.results.len() == 1, "{report:?}");
}

/// The run returns when no kernel runs any more, so that the program may drop what the kernels use.
#[test]
fn an_error_of_a_kernel_waits_for_the_others() {
    let mut graph = Graph::default();
    let (begun, ended) = (Count::default(), Count::default());
    let waits = begun.clone();
    graph.node_with("fails", 0, &[], move |_, _| {
        waits.wait_for(1)?;
        Err("no more".into())
    });
    let counted = ended.clone();
    graph.node_with("goes on", 0, &[], move |step, inputs| {
        begun.add();
        thread::sleep(Duration::from_millis(200));
        counted.add();
        sum(step, inputs)
    });
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
    let mut executors =
        split.executors(transfers, &ExecutorSettings { window: 1, ..settings(ReceiveMode::Callback) });
    let error = run_all(&mut executors, 1).remove(0).0.unwrap_err();
    assert!(matches!(error.problem(), Problem::Kernel { node, .. } if node == "fails"), "{error}");
    assert_eq!(ended.get(), 1);
}

#[test]
fn numbers_of_threads_that_can_not_be_are_refused_by_name() {
    let of = |receive, threads| {
        let mut graph = Graph::default();
        graph.input("input", 0);
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
        let settings = ExecutorSettings { threads, ..settings(receive) };
        let mut executors = split.executors(transfers, &settings);
        run_all(&mut executors, 1).remove(0).0.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(of(ReceiveMode::Blocking, 1), Ok(()));
    let error = of(ReceiveMode::Blocking, 2).unwrap_err();
    assert_eq!(error, "threads: 2: the receive mode blocking runs nodes in order, so it takes 1");
    let error = of(ReceiveMode::Callback, 0).unwrap_err();
    assert_eq!(error, "threads: it is 0; at least 1 thread must run nodes");
}
