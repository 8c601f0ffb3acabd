//! The order of nodes and receives. No test here measures time: each waits for a count that only the right
//! order reaches.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::support::{Count, Graph, HANG, Log, Numbers, Seen, run_all, sum};
use crate::error::{GraphError, Problem};
use crate::placement::CrossingId;
use crate::schedule::executor::ExecutorSettings;
use crate::schedule::{Executor, ReceiveMode, RunReport, Transfers};

fn settings(receive: ReceiveMode, window: usize) -> ExecutorSettings {
    ExecutorSettings { receive, window, deadline: HANG, threads: 1 }
}

/// Part 1 needs eight tensors of part 0, and has eight nodes that need none. Part 0 computes its tensors when
/// these nodes have run.
fn outstanding(mode: ReceiveMode, deadline: Duration) -> Result<RunReport, GraphError> {
    let mut graph = Graph::default();
    let ran = Count::default();
    let mut far = Vec::new();
    for at in 0..8 {
        let ran = ran.clone();
        far.push(graph.node_with(&format!("far {at}"), 0, &[], move |step, inputs| {
            ran.wait_for(8)?;
            sum(step, inputs)
        }));
    }
    for outlet in far {
        let joined = graph.sum(&format!("joined {}", outlet.node.0), 1, &[outlet]);
        graph.result(joined);
    }
    for at in 0..8 {
        let ran = ran.clone();
        graph.node_with(&format!("near {at}"), 1, &[], move |step, inputs| {
            ran.add();
            sum(step, inputs)
        });
    }
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
    let mut executors = split.executors(transfers, &settings(mode, 1));
    executors[1].settings.deadline = deadline;
    let (far, near) = executors.split_at_mut(1);
    let feed = |_, _| Err("there is no input".into());
    thread::scope(|scope| {
        scope.spawn(move || far[0].run(0..1, &mut { feed }));
        let report = near[0].run(0..1, &mut { feed });
        // If part 1 has failed, part 0 must not wait for its nodes.
        (0..8).for_each(|_| ran.add());
        report
    })
}

#[test]
fn polling_async_and_callback_run_other_nodes_while_receives_are_outstanding() {
    for mode in [ReceiveMode::PollingAsync, ReceiveMode::Callback] {
        let report = outstanding(mode, HANG).unwrap();
        assert_eq!(report.ran, 16, "{mode}");
        // All nodes that need no receive ran before the first receive could arrive.
        assert!(report.ran_while_outstanding >= 7, "{mode}: {report:?}");
        assert_eq!(report.received, 8, "{mode}");
        assert!(report.missed >= 8, "{mode}: {report:?}");
    }
}

#[test]
fn blocking_runs_no_other_node_while_a_receive_is_outstanding() {
    // The far nodes wait for near nodes, which wait behind the receive: nothing goes on.
    let error = outstanding(ReceiveMode::Blocking, Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error.problem(), Problem::Deadline { peer: 0, .. }), "{error}");
    assert!(error.to_string().contains("far 0 to part 1 of step 0"), "{error}");
}

#[test]
fn a_send_begins_before_later_nodes_of_its_part_run() {
    for mode in ReceiveMode::ALL {
        let mut graph = Graph::default();
        let (consumed, waits) = (Count::default(), Count::default());
        let early = graph.sum("early", 0, &[]);
        let waits_for = (consumed.clone(), waits.clone());
        graph.node_with("late", 0, &[early], move |step, inputs| {
            waits_for.1.add();
            waits_for.0.wait_for(step + 1)?;
            sum(step, inputs)
        });
        let counted = consumed.clone();
        graph.node_with("consumer", 1, &[early], move |step, inputs| {
            counted.add();
            sum(step, inputs)
        });
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
        let ended = run_all(&mut split.executors(transfers, &settings(mode, 1)), 3);
        for (report, _) in ended {
            report.unwrap();
        }
        assert_eq!((consumed.get(), waits.get()), (3, 3), "{mode}");
    }
}

#[test]
fn the_next_step_begins_while_a_step_waits_for_another_part() {
    for mode in [ReceiveMode::PollingAsync, ReceiveMode::Callback] {
        let mut graph = Graph::default();
        let begun = Count::default();
        let counted = begun.clone();
        let there = graph.node_with("there", 0, &[], move |step, inputs| {
            counted.add();
            sum(step, inputs)
        });
        let waited = begun.clone();
        // The answer to step 0 comes only if part 0 has begun step 2.
        let answer = graph.node_with("answer", 1, &[there], move |step: u64, inputs| {
            waited.wait_for((step + 3).min(6))?;
            sum(step, inputs)
        });
        graph.sum("back", 0, &[answer]);
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 3).unwrap();
        for (report, _) in run_all(&mut split.executors(transfers, &settings(mode, 3)), 6) {
            assert_eq!(report.unwrap().steps.len(), 6, "{mode}");
        }
    }
}

#[test]
fn a_send_without_a_free_buffer_does_not_block_other_nodes() {
    for mode in ReceiveMode::ALL {
        let mut graph = Graph::default();
        let ran = Count::default();
        let sent = graph.sum("sent", 0, &[]);
        let counted = ran.clone();
        graph.node_with("local", 0, &[], move |step, inputs| {
            counted.add();
            sum(step, inputs)
        });
        let waited = ran.clone();
        let gate = graph.node_with("gate", 1, &[], move |step, inputs| {
            // Part 1 takes nothing more before part 0 has run step 3, although there is only one buffer.
            waited.wait_for(4)?;
            sum(step, inputs)
        });
        graph.sum("taken", 1, &[gate, sent]);
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
        let mut ended = run_all(&mut split.executors(transfers, &settings(mode, 4)), 4);
        ended.remove(1).0.unwrap();
        let report = ended.remove(0).0.unwrap();
        assert_eq!(report.ran, 8, "{mode}");
        let steps: Vec<u64> = report.steps.iter().map(|step| step.step).collect();
        assert_eq!(steps, [0, 1, 2, 3], "{mode}");
    }
}

#[test]
fn the_last_consumer_of_a_value_has_it_alone() {
    let mut graph = Graph::default();
    let alone = Log::default();
    let input = graph.input("input", 0);
    let note = |name: &'static str, alone: &Log| {
        let alone = alone.clone();
        move |step: u64, inputs: Vec<Numbers>| {
            let counts: Vec<usize> = inputs.iter().map(|input| Arc::strong_count(&input.0)).collect();
            alone.add(format!("{name} {counts:?}"));
            sum(step, inputs)
        }
    };
    let first = graph.node_with("first", 0, &[input], note("first", &alone));
    let second = graph.node_with("second", 0, &[input, first], note("second", &alone));
    let third = graph.node_with("third", 1, &[second, second], note("third", &alone));
    graph.node_with("fourth", 1, &[third], note("fourth", &alone));
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
    let mut executors = split.executors(transfers, &settings(ReceiveMode::PollingAsync, 1));
    let feed = |step, _| Ok(Numbers::of(&[step]));
    thread::scope(|scope| {
        for executor in &mut executors {
            scope.spawn(move || executor.run(0..1, &mut { feed }).unwrap());
        }
    });
    // The input is used twice: the first consumer shares it, and the second has it alone. A node that uses a
    // value twice shares it with itself.
    assert_eq!(alone.lines(), ["first [2]", "second [1, 1]", "third [2, 2]", "fourth [1]"]);
}

#[test]
fn a_thread_with_nothing_to_do_sleeps() {
    for mode in ReceiveMode::ALL {
        let received_after = |delay| {
            let mut graph = Graph::default();
            let there = graph.sum("there", 0, &[]);
            graph.sum("taken", 1, &[there]);
            let split = graph.split();
            let delay = move |_: CrossingId, _| Duration::from_millis(delay);
            let transfers = Transfers::delayed(&split.placements, 1, delay).unwrap();
            let executors = split.executors(transfers, &settings(mode, 1)).into_iter();
            let mut executors: Vec<_> = executors.map(|executor| executor.spin(Duration::ZERO)).collect();
            run_all(&mut executors, 1).remove(1).0.unwrap()
        };
        // A thread that has no core until the tensor is there has nothing to sleep for.
        let mut reports = [150, 1500, 15_000].into_iter().map(received_after);
        let report = reports.find(|report| report.slept >= 1);
        let report = report.unwrap_or_else(|| panic!("{mode}: no thread slept"));
        assert_eq!(report.late, 0, "{mode}: {report:?}");
        // A thread that does not sleep polls thousands of times in 150 ms.
        assert!(report.missed <= 10 * (1 + report.slept), "{mode}: {report:?}");
    }
}

#[test]
fn a_replay_sends_the_same_tensors_again_and_computes_nothing() {
    for mode in ReceiveMode::ALL {
        let mut graph = Graph::default();
        let ran = Count::default();
        let counted = ran.clone();
        let there = graph.node_with("there", 0, &[], move |step, inputs| {
            counted.add();
            sum(step, inputs)
        });
        let counted = ran.clone();
        let back = graph.node_with("back", 1, &[there], move |step, inputs| {
            counted.add();
            sum(step, inputs)
        });
        let end = graph.sum("end", 0, &[back]);
        graph.result(end);
        let split = graph.split();
        let transfers = Transfers::in_memory(&split.placements, 2).unwrap();
        let mut executors = split.executors(transfers, &settings(mode, 2));
        thread::scope(|scope| {
            for executor in &mut executors {
                scope.spawn(move || {
                    let mut feed = |_, _| Err("there is no input".into());
                    executor.run_and_keep(0..3, &mut feed).unwrap();
                    let report = executor.replay(3..10).unwrap();
                    assert_eq!((report.received, report.steps.len()), (7, 7), "{mode}");
                });
            }
        });
        assert_eq!(ran.get(), 6, "{mode}: only the first run computes");
        for (part, executor) in executors.iter().enumerate() {
            assert_eq!(executor.counts(CrossingId(part)).sent, 10, "{mode}");
        }
    }
}

#[test]
fn runs_and_their_steps_are_spans() {
    let mut graph = Graph::default();
    let input = graph.input("input", 0);
    let far = graph.sum("far", 0, &[input]);
    let near = graph.sum("near", 1, &[far]);
    graph.result(near);
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 2).unwrap();
    let mut executors = split.executors(transfers, &settings(ReceiveMode::Callback, 2));
    let logs: Vec<String> = thread::scope(|scope| {
        let run = |executor: &mut Executor<Numbers>| {
            ::support::logged(|| drop(executor.run(0..3, &mut Seen::default()).unwrap()))
        };
        let threads: Vec<_> = executors.iter_mut().map(|it| scope.spawn(move || run(it))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (part, (log, crossing)) in logs.iter().zip(["receives=0 sends=1", "receives=1 sends=0"]).enumerate() {
        let run = format!("graph_run{{part={part} steps=0..3 work=Compute}}: ");
        let steps =
            (0..3).map(|step| format!("{}:graph_step{{step={step} {crossing}}}: ", &run[..run.len() - 2]));
        for span in [run.clone()].into_iter().chain(steps) {
            for event in ["new", "close"] {
                let lines = log.lines().filter(|line| {
                    line.contains(&span)
                        && line.split(": ").any(|word| word.split_whitespace().next() == Some(event))
                });
                assert_eq!(lines.count(), 1, "{span}{event}:\n{log}");
            }
        }
    }
}
