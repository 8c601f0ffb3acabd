//! Waiting for a word that the peer writes.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use super::super::{ChannelError, lock};
use super::{End, Link};
use crate::endpoint::Watched;
use crate::memory::SharedRegion;

/// A word, the value that it is to reach, and who waits.
#[derive(Debug)]
pub(in crate::tensor) struct Wait {
    link: Arc<Link>,
    end: Arc<End>,
    port: u32,
    memory: SharedRegion,
    offset: usize,
    /// A tail, which must have exactly this value; a count may have gone on.
    exactly: bool,
    target: u64,
    waker: Mutex<Option<Waker>>,
    asked: AtomicBool,
}

/// A device that places in order may bring a small write after the peer has looked whether we sleep. Then this is how long
/// the sleep lasts.
const NAP: Duration = Duration::from_millis(20);

impl Wait {
    /// Waits until the word at `offset` of `memory` is `target`, or at least `target`.
    pub(in crate::tensor) async fn until(
        link: &Arc<Link>,
        end: &Arc<End>,
        port: u32,
        (memory, offset): (&SharedRegion, usize),
        target: u64,
        exactly: bool,
    ) -> Result<(), ChannelError> {
        let wait = Arc::new(Self {
            link: Arc::clone(link),
            end: Arc::clone(end),
            port,
            memory: memory.clone(),
            offset,
            exactly,
            target,
            waker: Mutex::new(None),
            asked: AtomicBool::new(false),
        });
        let watched: Arc<dyn Watched> = Arc::clone(&wait) as Arc<dyn Watched>;
        let mut watching = false;
        loop {
            let come = poll_fn(|context| {
                if wait.has_come() {
                    return Poll::Ready(());
                }
                *lock(&wait.waker) = Some(context.waker().clone());
                if !std::mem::replace(&mut watching, true) {
                    link.queue(port).watch(Arc::downgrade(&watched) as Weak<dyn Watched>);
                }
                if wait.has_come() { Poll::Ready(()) } else { Poll::Pending }
            });
            // A nap that is over looks anew, and so does a wake-up.
            let _ = tokio::time::timeout(NAP, come).await;
            if wait.is_reached() {
                return Ok(());
            }
            link.check()?;
            watching &= lock(&wait.waker).is_some();
        }
    }

    fn is_reached(&self) -> bool {
        let value = self.memory.load_u64(self.offset).unwrap_or(0);
        if self.exactly { value == self.target } else { value >= self.target }
    }

    fn has_come(&self) -> bool {
        self.is_reached() || self.link.fault().is_some()
    }
}

impl Watched for Wait {
    fn check(&self, wakers: &mut Vec<Waker>) -> bool {
        let come = self.has_come();
        if come {
            wakers.extend(lock(&self.waker).take());
        }
        come
    }

    fn ask_for_completion(&self) {
        // What can't be asked for, a nap finds.
        if !self.asked.swap(true, Ordering::Relaxed) {
            let _ = self.link.say_asleep(&self.end, self.target, self.port);
        }
    }
}
