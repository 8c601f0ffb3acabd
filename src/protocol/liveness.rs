//! Pings a silent peer, and notices that it does not answer.

use std::time::{Duration, Instant};

/// The state of pings and answers.
#[derive(Debug)]
pub(super) struct Liveness {
    interval: Option<Duration>,
    timeout: Duration,
    last_received: Instant,
    /// True if a ping is to be sent.
    pub(super) ping_due: bool,
    /// The time by which the peer must have answered the ping.
    answer_by: Option<Instant>,
    /// The time of the next check before `answer_by`. An answer that arrives wakes no task, so this check finds the answer.
    look_again: Instant,
    /// The number of pings sent, which is the nonce of the last one.
    pub(super) pings: u64,
    /// The nonce of the newest ping that was answered.
    pub(super) answered: u64,
    /// The nonce of the peer's ping, until it is sent back.
    pub(super) pong_due: Option<u64>,
}

impl Liveness {
    pub(super) fn new(interval: Option<Duration>, timeout: Duration, now: Instant) -> Self {
        Self {
            interval,
            timeout,
            last_received: now,
            ping_due: false,
            answer_by: None,
            look_again: now,
            pings: 0,
            answered: 0,
            pong_due: None,
        }
    }

    /// Notes that a message arrived. Any message is a sign of life.
    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.answer_by = None;
        self.ping_due = false;
    }

    /// Notes that a ping is sent, and returns its nonce.
    pub(super) fn ping(&mut self) -> u64 {
        self.ping_due = false;
        self.pings += 1;
        self.pings
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let interval = self.interval?;
        Some(self.answer_by.map_or(self.last_received + interval, |answer_by| answer_by.min(self.look_again)))
    }

    /// Returns true if the peer did not answer in time.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> bool {
        let Some(interval) = self.interval else { return false };
        if let Some(answer_by) = self.answer_by {
            self.look_again = now + interval;
            return now >= answer_by;
        }
        if now < self.last_received + interval {
            return false;
        }
        self.look_again = now + interval;
        // The time also runs while the ping waits for a credit: a peer that gives no credits is as bad as a silent one.
        self.ping_due = true;
        self.answer_by = Some(now + self.timeout);
        false
    }
}
