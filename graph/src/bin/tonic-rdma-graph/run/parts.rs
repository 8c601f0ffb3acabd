//! The parts of a run, and what becomes of the run when one of them ends.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic_rdma_commands::Failure;

use crate::control::messages::{Differs, Order, Report};
use crate::control::{Event, Links};
use crate::launch::Children;

/// How long the other parts may take to report after one has failed. The first to report is not always the one that failed first.
const GRACE: Duration = Duration::from_secs(2);

/// The parts.
#[derive(Debug)]
pub(crate) struct Parts {
    links: Links,
    children: Children,
    /// The longest wait for all parts.
    limit: Duration,
    /// Tensors that differ, as they were reported.
    pub(crate) differing: Vec<(Differs, Bytes)>,
}

impl Parts {
    /// Opens the streams to all parts.
    pub(crate) async fn open(
        mut children: Children,
        addresses: &[String],
        limit: Duration,
    ) -> Result<Self, Failure> {
        let mut links = Links::new();
        for (part, address) in addresses.iter().enumerate() {
            let hint = || match children.has(part) {
                true => children.status(part),
                false => format!("start `tonic-rdma-graph serve --listen {address}` there"),
            };
            links.open(address, hint).await?;
        }
        Ok(Self { links, children, limit, differing: Vec::new() })
    }

    /// Returns the number of parts.
    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// Sends an order to a part.
    pub(crate) async fn send(&mut self, part: usize, order: &Order, content: Bytes) -> Result<(), Failure> {
        let limit = self.limit;
        match tokio::time::timeout(limit, self.links.send(part, order, content)).await {
            Ok(sent) => sent,
            Err(_) => Err(self.late(&[part], "took an order")),
        }
    }

    /// Sends an order to all parts.
    pub(crate) async fn send_all(&mut self, order: &Order) -> Result<(), Failure> {
        for part in 0..self.len() {
            self.send(part, order, Bytes::new()).await?;
        }
        Ok(())
    }

    /// Waits for a report of each part. `took` takes it, or gives another report back. `what` ends the sentence "part 0 has not …".
    pub(crate) async fn gather<T>(
        &mut self,
        what: &str,
        took: impl Fn(Report) -> Result<T, Report>,
    ) -> Result<Vec<T>, Failure> {
        let mut found: Vec<Option<T>> = (0..self.len()).map(|_| None).collect();
        let end = Instant::now() + self.limit;
        while found.iter().any(Option::is_none) {
            let left = end.saturating_duration_since(Instant::now());
            match self.links.next(left).await {
                Some((_, Event::Report(Report::Differs(differs), content))) => {
                    self.differing.push((differs, content));
                }
                Some((part, Event::Report(Report::Failed { reason, usage }, _))) => {
                    return Err(self.failed(part, reason, usage).await);
                }
                Some((part, Event::Report(report, _))) => match took(report) {
                    Ok(value) => found[part] = Some(value),
                    Err(other) => {
                        return Err(Failure::run(format!("part {part} has not {what}: it sent {other:?}")));
                    }
                },
                Some((part, Event::Ended(reason))) => return Err(self.ended(part, &reason)),
                None => {
                    let late: Vec<usize> = (0..found.len()).filter(|part| found[*part].is_none()).collect();
                    return Err(self.late(&late, what));
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    fn late(&self, parts: &[usize], what: &str) -> Failure {
        let names: Vec<String> = parts.iter().map(usize::to_string).collect();
        Failure::run(format!(
            "part {} has not {what} within {} s; --timeout gives it more time",
            names.join(", "),
            self.limit.as_secs()
        ))
    }

    /// Returns the failure of a run in which a part has failed. If the process of another part has ended, that is the reason.
    async fn failed(&mut self, part: usize, reason: String, usage: bool) -> Failure {
        let end = Instant::now() + GRACE;
        let mut first = (part, reason, usage);
        let mut failed = vec![part];
        while failed.len() < self.len() {
            match self.links.next(end.saturating_duration_since(Instant::now())).await {
                Some((other, Event::Ended(reason))) if !failed.contains(&other) => {
                    return self.ended(other, &reason);
                }
                Some((other, Event::Report(Report::Failed { reason, usage }, _)))
                    if !failed.contains(&other) =>
                {
                    failed.push(other);
                    // A part that lost a peer says less than the peer.
                    if usage && !first.2 || first.1.contains("peer") && !reason.contains("peer") {
                        first = (other, reason, usage);
                    }
                }
                Some(_) => {}
                None => break,
            }
        }
        let (part, reason, usage) = first;
        let message = format!("part {part}: {reason}");
        if usage { Failure::usage(message) } else { Failure::run(message) }
    }

    fn ended(&mut self, part: usize, reason: &str) -> Failure {
        match self.children.has(part) {
            true => Failure::run(format!("part {part}: {}", self.children.status(part))),
            false => Failure::run(format!("part {part} is gone: {reason}")),
        }
    }
}
