//! A switch that keeps a current-thread runtime from sleeping during the turns of a mode: the runtime looks for
//! arrivals again and again.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

/// Number of looks after which the thread yields to other processes, for machines with more processes than cores.
const LOOKS: u32 = 16;

/// Keeps the runtime awake from [`begin`](Self::begin) to [`end`](Self::end). Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAwake {
    task: Arc<Mutex<Option<AbortHandle>>>,
}

impl KeepAwake {
    /// Keeps the current runtime from sleeping from now on, if it has one thread. In a multi-thread runtime the other
    /// threads still sleep.
    pub(crate) fn begin(&self) {
        let task = tokio::spawn(async {
            // A task that yields is polled last: tokio looks for arrivals, without waiting for any, before it polls the
            // task again.
            for look in 1u32.. {
                tokio::task::yield_now().await;
                if look.is_multiple_of(LOOKS) {
                    std::thread::yield_now();
                }
            }
        });
        self.replace(Some(task.abort_handle()));
    }

    /// Lets the runtime sleep again.
    pub(crate) fn end(&self) {
        self.replace(None);
    }

    fn replace(&self, task: Option<AbortHandle>) {
        let mut place = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = std::mem::replace(&mut *place, task) {
            other.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Returns how often a current-thread runtime went to sleep while bytes went to and fro between it and a thread.
    fn sleeps(awake: bool) -> usize {
        let sleeps = Arc::new(AtomicUsize::new(0));
        let (parks, round_trips) = (Arc::clone(&sleeps), 50);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().on_thread_park(move || {
            parks.fetch_add(1, Ordering::Relaxed);
        });
        let runtime = runtime.build().unwrap();
        runtime.block_on(async {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let echo = std::thread::spawn(move || {
                use std::io::{Read, Write};
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_nodelay(true).unwrap();
                let mut byte = [0];
                while stream.read(&mut byte).unwrap() == 1 {
                    // On a busy machine an immediate answer may arrive before the runtime looks for it.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    stream.write_all(&byte).unwrap();
                }
            });
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let keep = KeepAwake::default();
            if awake {
                keep.begin();
            }
            // Lets the task begin.
            tokio::task::yield_now().await;
            sleeps.store(0, Ordering::Relaxed);
            for byte in (0..round_trips).map(|number| number as u8) {
                stream.write_all(&[byte]).await.unwrap();
                assert_eq!(stream.read_u8().await.unwrap(), byte);
            }
            let slept = sleeps.load(Ordering::Relaxed);
            keep.end();
            drop(stream);
            echo.join().unwrap();
            slept
        })
    }

    #[test]
    fn a_runtime_sleeps_between_answers_unless_it_is_kept_awake() {
        assert_eq!(sleeps(true), 0);
        assert!(sleeps(false) > 0);
    }

    #[tokio::test]
    async fn two_begins_and_an_end_leave_no_task() {
        let awake = KeepAwake::default();
        awake.begin();
        awake.begin();
        awake.end();
        awake.end();
        let metrics = tokio::runtime::Handle::current().metrics();
        while metrics.num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
