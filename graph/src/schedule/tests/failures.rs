//! Failures: each is a named error, and all parts end.

use std::thread;
use std::time::Duration;

use super::support::{Graph, HANG, Kernels, Numbers, PANICS, run_all, sum};
use crate::dataflow::{KernelError, NodeId, Outlet};
use crate::error::Problem;
use crate::placement::{CrossingId, Part};
use crate::schedule::executor::ExecutorSettings;
use crate::schedule::{Direction, Executor, Program, ReceiveMode, Transfers};

fn settings(receive: ReceiveMode) -> ExecutorSettings {
    ExecutorSettings { receive, window: 2, deadline: HANG, threads: 1 }
}

/// Makes three parts in a ring: part 1 computes with `kernel`, and part 0 waits for part 2.
fn ring(
    receive: ReceiveMode,
    kernel: impl FnMut(u64, Vec<Numbers>) -> Result<Vec<Numbers>, KernelError> + Send + 'static,
) -> Vec<Executor<Numbers>> {
    let mut graph = Graph::default();
    let input = graph.input("input", 0);
    let middle = graph.node_with("middle", 1, &[input], kernel);
    let last = graph.sum("last", 2, &[middle]);
    let back = graph.sum("back", 0, &[last]);
    graph.result(back);
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 2).unwrap();
    split.executors(transfers, &settings(receive))
}

fn nothing(_: u64, _: crate::dataflow::NodeId) -> Result<Numbers, KernelError> {
    Err("there is nothing to feed".into())
}

#[test]
fn an_error_of_a_kernel_ends_all_parts() {
    for mode in ReceiveMode::ALL {
        let fails = |step, inputs| if step == 3 { Err("no more".into()) } else { sum(step, inputs) };
        let mut executors = ring(mode, fails);
        let errors: Vec<_> =
            run_all(&mut executors, 6).into_iter().map(|(report, _)| report.unwrap_err()).collect();
        assert!(
            matches!(errors[1].problem(), Problem::Kernel { node, .. } if node == "middle"),
            "{:?}",
            errors[1]
        );
        for part in [0, 2] {
            let Problem::PeerFailed { peer: 1, reason } = errors[part].problem() else {
                panic!("{:?}", errors[part])
            };
            assert_eq!(reason, "node middle (Test) failed: no more", "{mode}");
        }
        let again = executors[1].run(10..11, &mut nothing);
        assert!(matches!(again.as_ref().unwrap_err().problem(), Problem::Failed), "{again:?}");
    }
}

#[test]
fn a_kernel_that_panics_is_an_error() {
    let mut executors = ring(ReceiveMode::PollingAsync, |_, _| panic!("index {} is out of bounds", 7));
    let errors: Vec<_> = run_all(&mut executors, 1).into_iter().map(|it| it.0.unwrap_err()).collect();
    let Problem::PeerFailed { reason, .. } = errors[0].problem() else { panic!("{:?}", errors[0]) };
    assert_eq!(reason, "node middle (Test) failed: it panicked: index 7 is out of bounds");
}

#[test]
fn a_receive_whose_value_panics_is_an_error() {
    for mode in ReceiveMode::ALL {
        let mut executors = ring(mode, |_, _| Ok(vec![Numbers::of(&[PANICS])]));
        // Part 1 has ended its only step before.
        let mut parts = run_all(&mut executors, 1).into_iter().map(|(report, _)| report);
        let errors = [parts.next(), parts.nth(1)].map(|report| report.unwrap().unwrap_err());
        let Problem::Transfer { crossing, peer: 1, source, .. } = errors[1].problem() else {
            panic!("{mode}: {:?}", errors[1])
        };
        assert_eq!(crossing, "middle to part 2");
        assert_eq!(source.to_string(), "it panicked: an engine that fails (a test expects it)");
        assert!(
            matches!(errors[0].problem(), Problem::PeerFailed { peer: 2, .. }),
            "{mode}: {:?}",
            errors[0]
        );
    }
}

/// A program that panics when it sees one of its own values.
struct Panics {
    at: Option<Direction>,
}

impl Program<Numbers> for Panics {
    fn feed(&mut self, _: u64, _: NodeId) -> Result<Numbers, KernelError> {
        Ok(Numbers::of(&[1]))
    }

    fn result(&mut self, _: u64, _: Outlet, _: Numbers) -> Result<(), KernelError> {
        panic!("a program that fails (this test expects it)")
    }

    fn crossed(
        &mut self,
        direction: Direction,
        _: CrossingId,
        _: u64,
        _: &Numbers,
    ) -> Result<(), KernelError> {
        if self.at == Some(direction) {
            panic!("a program that fails (this test expects it)")
        } else {
            Ok(())
        }
    }
}

#[test]
fn a_program_that_panics_is_an_error() {
    for (at, expected) in [
        (Some(Direction::Sent), "crossing tensor input to part 1, step 0, between this part and part 1"),
        (Some(Direction::Received), "crossing tensor last to part 0, step 0, between this part and part 2"),
        (None, "node back (result) failed"),
    ] {
        let mut executors = ring(ReceiveMode::PollingAsync, sum);
        let mut rest = executors.split_off(1);
        let (error, others) = thread::scope(|scope| {
            let others = scope.spawn(|| run_all(&mut rest, 1));
            let error = executors[0].run(0..1, &mut Panics { at }).unwrap_err();
            (error, others.join().unwrap())
        });
        assert_eq!(error.to_string(), expected);
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "it panicked: a program that fails (this test expects it)");
        for error in others.into_iter().filter_map(|(report, _)| report.err()) {
            assert!(matches!(error.problem(), Problem::PeerFailed { .. }), "{error:?}");
        }
    }
}

#[test]
fn a_wrong_number_of_outputs_is_an_error() {
    let mut executors =
        ring(ReceiveMode::PollingAsync, |_, _| Ok(vec![Numbers::of(&[1]), Numbers::of(&[2])]));
    let error = run_all(&mut executors, 1).remove(0).0.unwrap_err().to_string();
    assert!(error.ends_with("node middle (Test) failed: it returned 2 outputs instead of 1"), "{error}");
}

#[test]
fn an_input_that_is_not_fed_is_an_error() {
    let mut executors = ring(ReceiveMode::PollingAsync, sum);
    let error = executors[0].run(0..1, &mut nothing).unwrap_err();
    assert!(matches!(error.problem(), Problem::Kernel { node, .. } if node == "input"), "{error}");
}

#[test]
fn a_part_that_is_gone_ends_the_others() {
    for mode in ReceiveMode::ALL {
        let mut executors = ring(mode, sum);
        let last = executors.pop().unwrap();
        let gone = thread::spawn(move || drop(last));
        for (part, (report, _)) in run_all(&mut executors, 6).into_iter().enumerate() {
            let error = report.unwrap_err();
            let named =
                matches!(error.problem(), Problem::PeerLost { peer: 2, .. } | Problem::PeerFailed { .. });
            assert!(named, "{mode}, part {part}: {error:?}");
        }
        gone.join().unwrap();
    }
}

#[test]
fn a_deadline_names_the_tensor_and_the_part_that_it_comes_from() {
    for mode in ReceiveMode::ALL {
        // Part 1 and part 2 never run.
        let mut executors = ring(mode, sum);
        executors[0].settings.deadline = Duration::from_millis(50);
        let mut feed = |_, _| Ok(Numbers::of(&[1]));
        let error = executors[0].run(0..2, &mut feed).unwrap_err();
        assert!(matches!(error.problem(), Problem::Deadline { peer: 2, .. }), "{mode}: {error}");
        assert!(error.to_string().contains("crossing tensor last to part 0 of step 0"), "{mode}: {error}");
        // The other parts end, too.
        let error = executors[1].run(0..2, &mut feed).unwrap_err();
        assert!(matches!(error.problem(), Problem::PeerFailed { peer: 0, .. }), "{mode}: {error}");
    }
}

#[test]
fn a_send_that_finds_no_buffer_until_the_deadline_is_an_error() {
    let mut graph = Graph::default();
    let sent = graph.sum("sent", 0, &[]);
    graph.sum("taken", 1, &[sent]);
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, 1).unwrap();
    let mut executors = split.executors(transfers, &settings(ReceiveMode::PollingAsync));
    executors[0].settings.deadline = Duration::from_millis(50);
    let error = executors[0].run(0..3, &mut nothing).unwrap_err();
    assert!(matches!(error.problem(), Problem::Deadline { peer: 1, .. }), "{error}");
    assert!(error.to_string().contains("sent to part 1 of step 1 finds no free buffer"), "{error}");
}

/// Part 0 sends a tensor for each of `steps` steps at once. Part 1 computes with `kernel`, one step at a
/// time.
fn sends_first(
    kernel: impl FnMut(u64, Vec<Numbers>) -> Result<Vec<Numbers>, KernelError> + Send + 'static,
    steps: usize,
    deadline: Duration,
) -> Vec<Executor<Numbers>> {
    let mut graph = Graph::default();
    let sent = graph.sum("sent", 0, &[]);
    graph.node_with("taken", 1, &[sent], kernel);
    let split = graph.split();
    let transfers = Transfers::in_memory(&split.placements, steps).unwrap();
    let settings = ExecutorSettings { window: 1, deadline, ..ExecutorSettings::default() };
    split.executors(transfers, &settings)
}

#[test]
fn a_receiver_that_is_slow_and_goes_on_is_no_error() {
    let slow = |step, inputs| {
        thread::sleep(Duration::from_millis(250));
        sum(step, inputs)
    };
    // All steps take longer than the deadline, and one takes much less, also on a slow machine.
    let mut executors = sends_first(slow, 25, Duration::from_secs(5));
    for (part, (report, _)) in run_all(&mut executors, 25).into_iter().enumerate() {
        assert!(report.is_ok(), "part {part}: {}", report.unwrap_err());
    }
}

#[test]
fn a_receiver_that_takes_nothing_is_named_with_the_tensor() {
    let mut executors = sends_first(sum, 3, Duration::from_millis(50));
    // Part 1 never runs.
    let error = executors[0].run(0..3, &mut nothing).unwrap_err();
    assert!(matches!(error.problem(), Problem::Deadline { peer: 1, .. }), "{error}");
    assert!(error.to_string().contains("sent to part 1 has been sent and is not taken"), "{error}");
}

#[test]
fn a_run_that_is_stopped_ends_all_parts() {
    for mode in ReceiveMode::ALL {
        let mut executors = ring(mode, sum);
        let stop = executors[1].stop_handle();
        // Part 0 does not run, so that part 1 waits.
        let mut waiting = executors.split_off(1);
        let stopper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            stop.stop();
        });
        let errors: Vec<_> = run_all(&mut waiting, 2).into_iter().map(|it| it.0.unwrap_err()).collect();
        assert!(matches!(errors[0].problem(), Problem::Stopped), "{mode}: {:?}", errors[0]);
        assert!(
            matches!(errors[1].problem(), Problem::PeerFailed { peer: 1, .. }),
            "{mode}: {:?}",
            errors[1]
        );
        stopper.join().unwrap();
    }
}

#[test]
fn bad_settings_are_named() {
    let mut executors = ring(ReceiveMode::PollingAsync, sum);
    let mut feed = |_, _| Ok(Numbers::of(&[1]));
    executors[0].settings.window = 0;
    let error = executors[0].run(0..1, &mut feed).unwrap_err();
    assert!(error.to_string().starts_with("window: "), "{error}");
    executors[0].settings.window = 1;
    let error = executors[0].replay(0..1).unwrap_err();
    assert!(error.to_string().contains("run_and_keep"), "{error}");
    let mut executors = ring(ReceiveMode::PollingAsync, sum);
    executors[0].run(4..4, &mut feed).unwrap();
    let error = executors[0].run(3..5, &mut feed).unwrap_err();
    assert!(error.to_string().contains("all steps before 4"), "{error}");
    assert_eq!("polling-async".parse::<ReceiveMode>().unwrap(), ReceiveMode::PollingAsync);
    assert!(
        "polling"
            .parse::<ReceiveMode>()
            .unwrap_err()
            .reason()
            .contains("polling-async, blocking or callback")
    );
}

#[test]
fn a_missing_kernel_is_named() {
    let mut graph = Graph::default();
    graph.sum("lonely", 0, &[]);
    let split = graph.split();
    let transfers = Transfers::<Numbers>::in_memory(&split.placements, 1).unwrap().remove(0);
    let made = Executor::new(split.graph, split.placements, Part(0), Kernels::new(), transfers);
    assert_eq!(made.unwrap_err().to_string(), "node lonely: it has no kernel in part 0");
}
