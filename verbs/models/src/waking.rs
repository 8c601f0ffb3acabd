//! Wake-ups: a thread that sleeps is woken if there is work for it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::thread;
use tonic_rdma_verbs::internal::shared_memory::{
    Arming, Attention, Flags, Guarded, Header, Kind, Orders, Reader, Word, Writer,
};

use crate::{Loom, LoomWord, explore, words};

/// Bytes of the ring of a model.
const RING: u64 = 256;

/// A sleeping owner gets an event for a record of the peer.
pub fn no_news_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let ring = Arc::new(words(RING as usize / 8));
        let attention = Arc::new(LoomWord::new(0));
        let event = Arc::new(LoomWord::new(0));
        let peer = {
            let (ring, attention, event) = (Arc::clone(&ring), Arc::clone(&attention), Arc::clone(&event));
            thread::spawn(move || {
                let mut writer = Writer::<Loom, O>::new(RING);
                let Some(place) = writer.reserve(&ring, 0) else { panic!("model: no room") };
                let header = Header {
                    kind: Kind::Send,
                    flags: Flags::FIRST,
                    length: 0,
                    immediate: 0,
                    address: 0,
                    key: 0,
                    total: 0,
                };
                writer.publish(&ring, &place, &header);
                // As `Connection::announce_news`.
                if Attention::of_peer::<Loom, O>(&attention).wants(Attention::NEWS) {
                    event.store(1, Relaxed);
                }
            })
        };
        // As `Queue::arm`, and the last look.
        Attention::NEWS.add::<Loom>(&attention);
        Attention::fence::<Loom, O>();
        let sleeps = Reader::<Loom, O>::new(RING).peek(&ring) == Ok(None);
        assert!(peer.join().is_ok());
        assert!(!sleeps || event.load(Relaxed) == 1, "model: the owner sleeps, and a record has come");
    })
}

/// What the threads of one process share with the peer.
#[derive(Debug)]
struct Requests<O> {
    arming: Arming<Loom, O>,
    attention: LoomWord,
    /// The number of requests whose progress a poller waits for.
    awaited: LoomWord,
    /// The number of records in the ring, and of those that the peer has taken.
    head: LoomWord,
    taken: LoomWord,
    event: LoomWord,
}

impl<O: Orders> Requests<O> {
    /// Carries out the record, as the peer. Returns false if the peer does not see it yet.
    fn carry_out(&self) -> bool {
        if self.head.load(Acquire) == 0 {
            return false;
        }
        self.taken.store(1, Release);
        // As `Connection::announce_progress`.
        if Attention::of_peer::<Loom, O>(&self.attention).wants(Attention::PROGRESS) {
            self.event.store(1, Relaxed);
        }
        true
    }
}

/// One thread posts a request while another thread arms the queue and sleeps, and the peer carries the request out.
pub fn no_progress_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let shared = Arc::new(Requests::<O> {
            arming: Arming::new(),
            attention: LoomWord::new(0),
            awaited: LoomWord::new(0),
            head: LoomWord::new(0),
            taken: LoomWord::new(0),
            event: LoomWord::new(0),
        });
        let peer_attention = LoomWord::new(0);
        let poster = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // As `SendQueue::post` and `SendQueue::after`.
                shared.head.store(1, Release);
                shared.awaited.store(1, Relaxed);
                let _ = Attention::of_peer::<Loom, O>(&peer_attention);
                let is_done = || shared.taken.load(Relaxed) == 1;
                if shared.arming.ask_for_progress(&shared.attention, is_done) {
                    shared.event.store(1, Relaxed);
                }
            })
        };
        let peer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.carry_out())
        };
        // As `Queue::arm` and `SendQueue::wants_progress`, and the last look.
        shared.arming.arm();
        if shared.awaited.load(Relaxed) != 0 {
            Attention::PROGRESS.add::<Loom>(&shared.attention);
        }
        Attention::fence::<Loom, O>();
        let sleeps = shared.awaited.load(Relaxed) == 0 || shared.taken.load(Relaxed) == 0;
        assert!(poster.join().is_ok());
        if !peer.join().unwrap_or(false) {
            assert!(shared.carry_out(), "model: the record is lost");
        }
        let woken = shared.event.load(Relaxed) == 1;
        assert!(!sleeps || woken, "model: the poller sleeps, and its request is done");
    })
}

/// A thread of the process stores work, and wakes the poller if it sleeps. As `Core::fail`, `Core::notify`, and
/// `QueuePair::progress`, which leaves completions.
pub fn no_work_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let arming = Arc::new(Arming::<Loom, O>::new());
        let work = Arc::new(LoomWord::new(0));
        let other = {
            let (arming, work) = (Arc::clone(&arming), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Relaxed);
                arming.wants_event()
            })
        };
        arming.arm();
        let sleeps = work.load(Relaxed) == 0;
        let woken = other.join().unwrap_or(false);
        assert!(!sleeps || woken, "model: the poller sleeps, and there is work");
    })
}

/// A guard ends while a record is published. The record has a guard. As `SendQueue::after` and `Core::look_after_records`.
pub fn no_record_is_unguarded<O: Orders + 'static>() -> u64 {
    explore(|| {
        let guarded = Arc::new(Guarded::<Loom, O>::new());
        assert!(guarded.begin() && !guarded.begin(), "model: a guard begins twice");
        let published = Arc::new(LoomWord::new(0));
        let poster = {
            let (guarded, published) = (Arc::clone(&guarded), Arc::clone(&published));
            thread::spawn(move || {
                published.store(1, Relaxed);
                let _ = Attention::of_peer::<Loom, O>(&LoomWord::new(0));
                guarded.begin()
            })
        };
        let goes_on = !guarded.end(|| published.load(Relaxed) == 1);
        let begins = poster.join().unwrap_or(false);
        assert!(goes_on || begins, "model: the record has no guard");
    })
}
