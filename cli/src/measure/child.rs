//! Child processes that run this program again. A child gets commands on its stdin and writes reports to its stdout, a line of JSON
//! each. It ends by itself when its parent ends.

use std::ops::Range;
use std::process::Command;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::process::{self, Child, Event, how_ended};

/// A line of a child's stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<R> {
    Report(R),
    /// The child can't continue: the reason, and whether the command line is wrong.
    Failed {
        reason: String,
        usage: bool,
    },
}

/// The running children of this process. The drop of this value kills all of them.
#[derive(Debug)]
pub(crate) struct Children<R> {
    running: Vec<Child>,
    sender: UnboundedSender<(usize, Event<Line<R>>)>,
    events: UnboundedReceiver<(usize, Event<Line<R>>)>,
}

impl<R: DeserializeOwned + Send + 'static> Children<R> {
    pub(crate) fn new() -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self { running: Vec::new(), sender, events }
    }

    /// Starts a child. Children have numbers, in the order of their starts.
    pub(crate) fn start(&mut self, name: &str, mut command: Command) -> Result<(), Failure> {
        use std::os::unix::process::CommandExt as _;

        // The child gets a process group of its own. So ctrl-c reaches this process alone, which then ends its
        // children.
        command.process_group(0);
        let (number, events) = (self.running.len(), self.sender.clone());
        let child = Child::start(name, command, move |event| events.send((number, event.parse())).is_ok())?;
        self.running.push(child);
        Ok(())
    }

    /// Returns the process number of a child.
    pub(crate) fn id(&self, child: usize) -> Option<u32> {
        self.running.get(child).map(Child::id)
    }

    /// Returns the name of a child.
    pub(crate) fn name(&self, child: usize) -> &str {
        self.running.get(child).map_or("an unknown process", Child::name)
    }

    /// Sends a command to some children. If one of them has ended, the wait for its answer fails.
    pub(crate) fn send(&mut self, children: Range<usize>, command: &impl Serialize) -> Result<(), Failure> {
        self.running[children].iter_mut().try_for_each(|child| child.send(command))
    }

    /// Waits until each of `children` has sent a report. The failure or the end of any child is an error. `patience` is
    /// the time to wait for the end of a child that explains the failure of another one.
    pub(crate) async fn hear(
        &mut self,
        children: Range<usize>,
        deadline: Instant,
        patience: Duration,
    ) -> Result<Vec<R>, Failure> {
        let mut reports: Vec<Option<R>> = children.clone().map(|_| None).collect();
        while let Some(missing) = reports.iter().position(Option::is_none) {
            let Ok(event) = tokio::time::timeout_at(deadline, self.events.recv()).await else {
                let name = self.name(children.start + missing);
                return Err(Failure::run(format!("{name} gave no answer in time: it is stuck")));
            };
            let Some((from, event)) = event else { return Err(Failure::run("all processes have ended")) };
            let name = self.name(from).to_owned();
            match event {
                Event::Report(Line::Report(report)) => match reports
                    .get_mut(from.wrapping_sub(children.start))
                {
                    Some(place) => *place = Some(report),
                    None => return Err(Failure::run(format!("{name} sent a report that nothing waits for"))),
                },
                Event::Report(Line::Failed { reason, usage: true }) => {
                    return Err(Failure::usage(format!("{name}: {reason}")));
                }
                Event::Report(Line::Failed { reason, usage: false }) => {
                    return self.explain(Err(Failure::run(format!("{name}: {reason}"))), patience).await;
                }
                event => return Err(ended(&name, event)),
            }
        }
        Ok(reports.into_iter().flatten().collect())
    }

    /// Waits for the unexpected end of a child, and returns the failure to report.
    pub(crate) async fn end(&mut self) -> Failure {
        while let Some((from, event)) = self.events.recv().await {
            match event {
                // A child that has reported a failure ends by itself. It explains nothing more.
                Event::Report(_) => {}
                Event::Ended(Some(status)) if status.success() => {}
                event => return ended(self.name(from), event),
            }
        }
        Failure::run("all processes have ended")
    }

    /// Returns `result`. If it is a failure and a child ends within `patience`, the end of the child is the failure,
    /// because others fail when their peer ends, and may report it before the end can be seen.
    pub(crate) async fn explain<T>(
        &mut self,
        result: Result<T, Failure>,
        patience: Duration,
    ) -> Result<T, Failure> {
        match result {
            Err(failure @ Failure::Run { .. }) => {
                Err(tokio::time::timeout(patience, self.end()).await.unwrap_or(failure))
            }
            other => other,
        }
    }
}

/// Returns the failure of a child that has ended, or whose stdout has another line than a report.
fn ended<R>(name: &str, event: Event<R>) -> Failure {
    Failure::run(match event {
        Event::Report(_) => format!("{name} sent an unexpected report"),
        Event::Garbage(line) => format!("{name} wrote a line that is no report: {line}"),
        Event::Ended(status) => format!("{name} ended in the middle of the run ({})", how_ended(status)),
    })
}

/// Receives the commands of the parent. The process ends when the parent does, even if its runtime is busy.
pub(crate) fn commands<C: DeserializeOwned + Send + 'static>() -> Result<UnboundedReceiver<C>, Failure> {
    let (sender, receiver) = mpsc::unbounded_channel();
    process::commands(move |command| drop(sender.send(command)))?;
    Ok(receiver)
}

/// Sends a report to the parent.
pub(crate) fn report(report: &impl Serialize) -> Result<(), Failure> {
    process::report(&Line::Report(report))
}

/// Reports a failure to the parent, which shows it. A second report here would repeat it.
pub(crate) fn report_failure(result: Result<(), Failure>) -> Result<(), Failure> {
    match result {
        Err(failure @ (Failure::Run { .. } | Failure::Usage { .. })) => {
            process::report(&Line::<()>::Failed { usage: failure.is_usage(), reason: failure.with_causes() })
        }
        other => other,
    }
}
