//! Requests to a peer's device that threads wait for. Several requests can be under way at a time: one of the
//! threads that wait reads the answers, and passes on those of the other threads.
//!
//! If the requests went one after the other, many threads that connect at once would wait for one another
//! longer than a peer may take.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::message::{self, Answer, LEAVE, Reply, Request};
use super::received::{Received, hang_up};
use crate::panics::lock;
use crate::soft::system::timespec;

/// Most requests under way at a time. The peer's device hangs up if its answers fill the socket, and the
/// socket has room for many more.
const MOST: usize = 16;

/// The requests to one device that threads wait for.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    state: Mutex<AskingState>,
    /// Signalled when an answer has come, when a request ends, and when no thread reads any more.
    changed: Condvar,
}

#[derive(Debug)]
struct AskingState {
    /// Number of the last request.
    last: u64,
    /// The requests under way by number, with the answers that have come.
    under_way: HashMap<u64, Option<FullAnswer>>,
    /// The number of requests that were given up, and whose answers have not come. A device sends no other
    /// answers.
    given_up: u64,
    /// Whether a thread reads answers.
    is_read: bool,
}

/// An answer with its descriptor.
pub(crate) type FullAnswer = (Answer, Option<Received>);

impl Default for AskingState {
    fn default() -> Self {
        Self { last: LEAVE, under_way: HashMap::new(), given_up: 0, is_read: false }
    }
}

/// A request under way. Dropping it makes room for another one.
struct UnderWay<'a> {
    asking: &'a Asking,
    sequence: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.asking.state);
        if let Some(None) = state.under_way.remove(&self.sequence) {
            state.given_up += 1;
        }
        drop(state);
        self.asking.changed.notify_all();
    }
}

impl Asking {
    /// Sends `request` with a number of its own, and waits for its answer until `deadline`. All callers use
    /// one `socket`. If the device sends something else than an answer, this side hangs up, so that all
    /// requests fail.
    pub(crate) fn ask(
        &self,
        socket: &impl AsFd,
        request: Request,
        deadline: Instant,
    ) -> io::Result<FullAnswer> {
        let under_way = self.begin(deadline)?;
        let request = Request { sequence: under_way.sequence, ..request };
        // The peer gives each object once, so nothing is asked for without time for the answer.
        left_until(deadline)?;
        // Requests to carry out records may have filled the socket.
        while let Err(error) = message::send_request(socket, &request, None) {
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error);
            }
            wait_for(socket, PollFlags::OUT, deadline)?;
        }
        let mut state = lock(&self.state);
        loop {
            let answer = state.under_way.get_mut(&request.sequence).and_then(Option::take);
            if let Some(answer) = answer {
                return Ok(answer);
            }
            if state.is_read {
                state = self.wait(state, deadline)?;
                continue;
            }
            state.is_read = true;
            drop(state);
            let read =
                wait_for(socket, PollFlags::IN, deadline).and_then(|()| message::receive_reply(socket));
            state = lock(&self.state);
            state.is_read = false;
            self.changed.notify_all();
            let (Reply { sequence, answer }, fd) = read.inspect_err(|error| {
                if error.kind() == io::ErrorKind::InvalidData {
                    hang_up(socket);
                }
            })?;
            if let Some(entry @ None) = state.under_way.get_mut(&sequence) {
                *entry = Some((answer, fd));
            } else if state.given_up > 0 {
                // A late answer to a request whose thread has given up.
                state.given_up -= 1;
            } else {
                hang_up(socket);
                let reason = "the peer's device sent an answer that no thread had asked for";
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
        }
    }

    /// Returns the number of answers that may still come, although no thread waits for them.
    pub(crate) fn late_answers(&self) -> u64 {
        lock(&self.state).given_up
    }

    /// Notes a new request, as soon as there is room for it.
    fn begin(&self, deadline: Instant) -> io::Result<UnderWay<'_>> {
        let mut state = lock(&self.state);
        while state.under_way.len() >= MOST {
            state = self.wait(state, deadline)?;
        }
        state.last += 1;
        let sequence = state.last;
        state.under_way.insert(sequence, None);
        Ok(UnderWay { asking: self, sequence })
    }

    /// Waits until the state may have changed.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, AskingState>,
        deadline: Instant,
    ) -> io::Result<MutexGuard<'a, AskingState>> {
        let left = left_until(deadline)?;
        let waited = self.changed.wait_timeout(state, left);
        Ok(waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the peer's device did not answer"));
    }
    Ok(left)
}

/// Waits until the socket is ready for `what`.
fn wait_for(fd: &impl AsFd, what: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        // Checked first, because a peer may send other replies without end.
        let timeout = timespec(left_until(deadline)?);
        match rustix::event::poll(&mut [PollFd::new(fd, what)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::thread::scope;

    use super::*;
    use crate::Access;
    use crate::soft::peers::message::{EndAnswer, Object};
    use crate::soft::peers::received::tests::socket_pair;

    /// Only a hang lasts as long.
    const TIMEOUT: Duration = Duration::from_secs(120);

    /// Asks for the object `id`. Returns the number in the answer.
    fn ask(asking: &Asking, socket: &OwnedFd, id: u64, timeout: Duration) -> io::Result<u64> {
        let request = Request { sequence: 0, number: 1, token: 2, object: Object::EventSocket(id) };
        match asking.ask(socket, request, Instant::now() + timeout)?.0 {
            Answer::End(end) => Ok(end.domain),
            other => panic!("{other:?}"),
        }
    }

    /// Waits for a request.
    fn receive(device: &OwnedFd) -> Request {
        wait_for(device, PollFlags::IN, Instant::now() + TIMEOUT).unwrap();
        message::receive_request(device).unwrap().unwrap().0
    }

    /// Answers with the number of the object that the request names.
    fn answer(device: &OwnedFd, request: &Request) {
        let Object::EventSocket(domain) = request.object else { panic!("{request:?}") };
        let access = Access::REMOTE_READ;
        let end = EndAnswer { access, shares_memory: true, ring: 0, domain, send_queue: 0, receive_queue: 0 };
        let reply = Reply { sequence: request.sequence, answer: Answer::End(end) };
        message::send_reply(device, &reply, &[]).unwrap();
    }

    #[test]
    fn each_thread_gets_its_answer_in_whatever_order_they_come() {
        let (asking, (ours, device)) = (Asking::default(), socket_pair());
        scope(|scope| {
            let ask = |id| ask(&asking, &ours, id, TIMEOUT);
            let threads: Vec<_> = (0..4).map(|id| scope.spawn(move || ask(id))).collect();
            let requests: Vec<_> = (0..4).map(|_| receive(&device)).collect();
            requests.iter().rev().for_each(|request| answer(&device, request));
            for (id, thread) in threads.into_iter().enumerate() {
                assert_eq!(thread.join().unwrap().unwrap(), id as u64);
            }
        });
        assert!(lock(&asking.state).under_way.is_empty());
    }

    #[test]
    fn a_thread_that_gives_up_harms_no_other() {
        let (asking, (ours, device)) = (Asking::default(), socket_pair());
        let has_asked = &AtomicBool::new(false);
        scope(|scope| {
            let ask = |id, timeout| ask(&asking, &ours, id, timeout);
            // A thread that has no core until its time is over sends nothing, and asks again.
            let impatient = scope.spawn(move || {
                let mut errors = (0..5000).map(|_| ask(1, Duration::from_millis(20)).unwrap_err());
                errors.find(|_| has_asked.load(Relaxed)).unwrap()
            });
            let late = receive(&device);
            has_asked.store(true, Relaxed);
            let patient = scope.spawn(move || ask(2, TIMEOUT));
            let mut request = receive(&device);
            while let Object::EventSocket(1) = request.object {
                request = receive(&device);
            }
            assert_eq!(impatient.join().unwrap().kind(), io::ErrorKind::TimedOut);
            answer(&device, &late);
            answer(&device, &request);
            assert_eq!(patient.join().unwrap().unwrap(), 2);
        });
    }

    #[test]
    fn a_limited_number_of_requests_is_under_way() {
        let (asking, (ours, device)) = (Asking::default(), socket_pair());
        let count = 4 * MOST;
        scope(|scope| {
            let ask = |id| ask(&asking, &ours, id, TIMEOUT);
            let threads: Vec<_> = (0..count as u64).map(|id| scope.spawn(move || ask(id))).collect();
            let mut requests: Vec<_> = (0..MOST).map(|_| receive(&device)).collect();
            assert!(message::receive_request(&device).is_err(), "one too many");
            for _ in MOST..count {
                answer(&device, &requests.remove(0));
                requests.push(receive(&device));
            }
            requests.iter().for_each(|request| answer(&device, request));
            for (id, thread) in threads.into_iter().enumerate() {
                assert_eq!(thread.join().unwrap().unwrap(), id as u64);
            }
        });
    }

    #[test]
    fn all_threads_learn_that_the_device_is_gone() {
        let (asking, (ours, device)) = (Asking::default(), socket_pair());
        scope(|scope| {
            let ask = |id| ask(&asking, &ours, id, TIMEOUT);
            let threads: Vec<_> = (0..4).map(|id| scope.spawn(move || ask(id))).collect();
            for _ in 0..4 {
                receive(&device);
            }
            drop(device);
            for thread in threads {
                let kind = thread.join().unwrap().unwrap_err().kind();
                assert!(matches!(kind, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset));
            }
        });
    }
}
