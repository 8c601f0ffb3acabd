//! The completions of requests, and the time that a request waits.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{SendQueue, SendState, Wait};
use crate::soft::completion_queue::{Remaining, Sink};
use crate::soft::queue_pair::outstanding::{Outstanding, Progress};
use crate::{CompletionStatus, PathSettings, QueuePairNumber, WorkCompletion};

impl SendQueue {
    /// Carries out waiting requests, and moves completions to `sink`. Returns [`Remaining::Work`] if `sink`
    /// has no room for all of them, and [`Remaining::Message`] if some of the requests, or a part of one,
    /// went into the ring, and others wait.
    pub(in crate::soft::queue_pair) fn poll(&self, sink: &mut Sink<'_>) -> Remaining {
        let mut queue = self.lock();
        self.ended.store(false, Relaxed);
        let more = self.take(&mut queue, sink);
        self.seen.store(queue.writer.freed(), Relaxed);
        if more {
            self.ended.store(true, Relaxed);
        }
        let before = queue.writer.head();
        if !queue.waiting.is_empty() {
            self.run(&mut queue);
        }
        self.after(&mut queue);
        let has_moved = queue.writer.head() != before;
        Remaining::message_if(has_moved && !queue.waiting.is_empty()).max(Remaining::work_if(more))
    }

    #[inline]
    fn take(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        let Some(connection) = self.core.connection() else {
            return self.flush(queue, sink);
        };
        // SYNC: the ends are noticed before the last check of the peer's progress.
        let peer_has_ended = self.core.peer_has_ended();
        if queue.writer.reclaim(connection.end.taken_word()).is_err() {
            self.violation();
        }
        let taken = queue.writer.freed();
        if !self.complete_reads(queue, sink) {
            return true;
        }
        while let Some(first) = queue.outstanding.front() {
            let status = match first.progress {
                Progress::InRing { end } | Progress::Pulled { end } if end <= taken => {
                    if !first.signaled {
                        queue.pop_first();
                        continue;
                    }
                    CompletionStatus::Success
                }
                Progress::Read => CompletionStatus::Success,
                Progress::Failed(status) => status,
                Progress::Flushed => self.status_of_end(queue),
                Progress::InRing { .. } | Progress::Pulled { .. } | Progress::Reading { .. } => break,
            };
            if sink.is_full() {
                return true;
            }
            self.complete_first(queue, status, sink);
        }
        if peer_has_ended || self.core.has_failed() {
            return self.flush(queue, sink);
        }
        false
    }

    /// Completes the READs that are done although requests without a completion before them are not, as far
    /// as the peer has shown. Returns false if `sink` has no room.
    fn complete_reads(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        while queue.reads_done > 0 {
            let ended = self.core.has_failed() || self.core.peer_has_ended();
            let silent = |it: &Outstanding| {
                !it.signaled && matches!(it.progress, Progress::InRing { .. } | Progress::Pulled { .. })
            };
            let found = queue.outstanding.iter().position(|it| it.progress == Progress::Read);
            let Some(index) = found else {
                queue.reads_done = 0;
                break;
            };
            let overtakes = queue.outstanding.range(..index).all(silent);
            if !ended && !overtakes {
                break;
            }
            if sink.is_full() {
                return false;
            }
            if let Some(done) = queue.pop_read(index, overtakes) {
                self.complete(queue, done, CompletionStatus::Success, sink);
            }
        }
        true
    }

    /// Completes the requests that can't be carried out any more.
    #[cold]
    fn flush(&self, queue: &mut SendState, sink: &mut Sink<'_>) -> bool {
        if !self.core.has_failed() && !self.core.peer_has_ended() {
            return false;
        }
        // SYNC: the end of the peer is noticed before the check of the record that it refused.
        let peer_has_ended = self.core.peer_has_ended();
        let failure = self.core.connection().and_then(|connection| connection.end.failure());
        while let Some(first) = queue.outstanding.front() {
            if sink.is_full() {
                return true;
            }
            let status = match (first.progress, failure) {
                (Progress::Failed(status), _) => status,
                (Progress::Read, _) => CompletionStatus::Success,
                (_, Some(_)) if queue.failed => CompletionStatus::WorkRequestFlushed,
                (
                    Progress::InRing { end } | Progress::Pulled { end } | Progress::Reading { end },
                    Some(failure),
                ) if end > failure.at => failure.status,
                // The peer takes the records of an end that fails, so this message will arrive.
                (Progress::InRing { .. }, None) if !peer_has_ended && !queue.failed => {
                    CompletionStatus::Success
                }
                _ => self.status_of_end(queue),
            };
            self.complete_first(queue, status, sink);
        }
        self.core.fail_requests();
        self.run(queue);
        !queue.outstanding.is_empty()
    }

    /// Takes the first outstanding request, and adds its completion.
    #[inline]
    fn complete_first(&self, queue: &mut SendState, status: CompletionStatus, sink: &mut Sink<'_>) {
        if let Some(done) = queue.pop_first() {
            if done.progress == Progress::Read {
                queue.reads_done -= 1;
            }
            self.complete(queue, done, status, sink);
        }
    }

    /// Adds the completion of a request that was taken from the outstanding ones.
    #[inline]
    fn complete(
        &self,
        queue: &mut SendState,
        done: Outstanding,
        status: CompletionStatus,
        sink: &mut Sink<'_>,
    ) {
        if matches!(done.progress, Progress::Reading { .. }) {
            queue.reading.pop_front();
        }
        if done.signaled {
            queue.signaled -= 1;
            self.core.send_queue.forget_completions(1);
        }
        if status != CompletionStatus::Success {
            queue.failed = true;
            self.core.fail_requests();
        } else if !done.signaled {
            return;
        }
        queue.freed += std::mem::take(&mut queue.unsignaled);
        sink.push(WorkCompletion {
            wr_id: done.wr_id,
            status,
            opcode: done.opcode,
            byte_len: 0,
            immediate: None,
            queue_pair: QueuePairNumber(self.core.number),
        });
    }

    /// Returns the status of a request that could not be carried out before the queue pair ended.
    fn status_of_end(&self, queue: &SendState) -> CompletionStatus {
        if queue.failed {
            return CompletionStatus::WorkRequestFlushed;
        }
        let peer_has_ended = self.core.peer_has_ended();
        let failure = self.core.connection().and_then(|connection| connection.end.failure());
        match failure {
            // The requests before the refused one have completed, so this is the refused one.
            Some(failure) => failure.status,
            None if peer_has_ended => CompletionStatus::RetryExceeded,
            None => CompletionStatus::WorkRequestFlushed,
        }
    }

    /// Returns the status of the first waiting request if `wait` has lasted too long.
    pub(super) fn expired(&self, queue: &mut SendState, wait: Wait) -> Option<CompletionStatus> {
        let deadline = match queue.retry_until {
            Some((reason, deadline)) if reason == wait => deadline,
            _ => {
                let deadline = self.deadline(wait);
                queue.retry_until = Some((wait, deadline));
                if let Some(deadline) = deadline {
                    self.core.notify_at(deadline);
                }
                deadline
            }
        };
        if deadline.is_none_or(|deadline| Instant::now() < deadline) {
            return None;
        }
        Some(match wait {
            Wait::Receive => CompletionStatus::RnrRetryExceeded,
            Wait::Connection | Wait::Room => CompletionStatus::RetryExceeded,
        })
    }

    /// Returns the time until which a request may wait.
    pub(super) fn deadline(&self, wait: Wait) -> Option<Instant> {
        let settings = self.core.settings()?;
        let timeout = match wait {
            Wait::Receive => {
                rnr_timeout(settings, self.core.connection().map_or(0, |peer| peer.end.rnr_timer()))
            }
            Wait::Connection => retry_timeout(settings),
            // The peer's own death or end bounds this wait, and the pings of the layers above.
            Wait::Room => None,
        };
        Some(Instant::now() + timeout?)
    }
}

/// Returns the time that a send waits for a receive; `None` means without end.
fn rnr_timeout(settings: &PathSettings, timer: u8) -> Option<Duration> {
    (settings.rnr_retry < 7).then(|| rnr_delay(timer) * u32::from(settings.rnr_retry))
}

/// Returns the time that a request waits for a peer that is not connected yet; `None` means without end.
fn retry_timeout(settings: &PathSettings) -> Option<Duration> {
    let timeout = u32::from(settings.timeout.min(31));
    let once = Duration::from_nanos(4096 << timeout);
    (timeout > 0).then(|| once * (u32::from(settings.retry_count) + 1))
}

/// Returns the delay of an RNR timer code (IBA vol. 1, table 45).
fn rnr_delay(code: u8) -> Duration {
    const TENS_OF_MICROSECONDS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TENS_OF_MICROSECONDS[usize::from(code) % 32] * 10)
}
