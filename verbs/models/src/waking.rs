//! Wake-ups: a thread that sleeps is woken if there is work for it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::sync::Mutex;
use loom::thread;
use tonic_rdma_verbs::unstable::shared_memory::{
    Answered, Arming, Attention, Debt, Flags, Guarded, Header, Kind, Orders, Reader, Watch, Word, Writer,
};

use crate::{Loom, LoomWord, explore, words};

/// Bytes of the ring of a model.
const RING: u64 = 256;
/// The key of the ring. Real keys are random.
const KEY: u64 = 1000;

/// A sleeping owner gets an event for a record of the peer.
pub fn no_news_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let ring = Arc::new(words(RING as usize / 8));
        let attention = Arc::new(LoomWord::new(0));
        let event = Arc::new(LoomWord::new(0));
        let peer = {
            let (ring, attention, event) = (Arc::clone(&ring), Arc::clone(&attention), Arc::clone(&event));
            thread::spawn(move || {
                let mut writer = Writer::<Loom, O>::new(RING, KEY);
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
                // As `Connection::settle`.
                if Attention::of_peer::<Loom, O>(&attention).wants(Attention::NEWS) {
                    event.store(1, Relaxed);
                }
            })
        };
        // As `Queue::arm`, and the last check.
        Attention::NEWS.add::<Loom>(&attention);
        Attention::fence::<Loom, O>();
        let sleeps = Reader::<Loom, O>::new(RING, KEY).peek(&ring) == Ok(None);
        assert!(peer.join().is_ok());
        assert!(!sleeps || event.load(Relaxed) == 1, "model: the owner sleeps, and a record has come");
    })
}

/// The peer makes one event for each request of the owner, although more records come. An owner that has
/// taken the event asks anew before it sleeps. The event is a socket, whose operations have a total order, so
/// all accesses read and write: loom has no such order for plain stores.
pub fn each_request_gets_an_event<O: Orders + 'static>() -> u64 {
    explore(|| {
        let news = Arc::new(LoomWord::new(0));
        let attention = Arc::new(LoomWord::new(0));
        let event = Arc::new(LoomWord::new(0));
        let peer = {
            let (news, attention, event) = (Arc::clone(&news), Arc::clone(&attention), Arc::clone(&event));
            thread::spawn(move || {
                let answered = Answered::<Loom>::default();
                for count in 1..=2 {
                    news.store(count, Release);
                    // As `Connection::settle`.
                    let attention = Attention::of_peer::<Loom, O>(&attention);
                    if attention.wants(Attention::NEWS) && answered.answer(attention) {
                        event.add(1);
                    }
                }
            })
        };
        // As `Queue::arm`.
        Attention::NEWS.ask::<Loom>(&attention);
        Attention::fence::<Loom, O>();
        // As `Queue::acknowledge_events`, then `Queue::arm`, and the last check.
        event.take(Relaxed);
        Attention::NEWS.ask::<Loom>(&attention);
        Attention::fence::<Loom, O>();
        let sleeps = news.load(Acquire) < 2;
        assert!(peer.join().is_ok());
        assert!(!sleeps || event.take(Relaxed) != 0, "model: the owner sleeps, and a record has come");
    })
}

/// What the threads of one process share with the peer.
#[derive(Debug)]
struct Requests<O> {
    arming: Arming<Loom, O>,
    attention: LoomWord,
    /// The lock of the send queue. It guards `awaited`, the number of requests whose progress a poller waits
    /// for.
    queue: Mutex<u64>,
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
        // As `Connection::settle`.
        if Attention::of_peer::<Loom, O>(&self.attention).wants(Attention::PROGRESS) {
            self.event.store(1, Relaxed);
        }
        true
    }
}

/// One thread posts a request while another thread arms the queue and sleeps, and the peer carries the
/// request out.
pub fn no_progress_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let shared = Arc::new(Requests::<O> {
            arming: Arming::default(),
            attention: LoomWord::new(0),
            queue: Mutex::new(0),
            head: LoomWord::new(0),
            taken: LoomWord::new(0),
            event: LoomWord::new(0),
        });
        let poster = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // As `SendQueue::post`, `after` and `after_post`, with the queue locked.
                let Ok(mut awaited) = shared.queue.lock() else { panic!("model: a lock") };
                shared.head.store(1, Release);
                *awaited = 1;
                if shared.arming.is_armed() {
                    Attention::PROGRESS.add::<Loom>(&shared.attention);
                    Attention::fence::<Loom, O>();
                    if shared.taken.load(Relaxed) == 1 {
                        shared.event.store(1, Relaxed);
                    }
                }
            })
        };
        let peer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.carry_out())
        };
        // As `Queue::arm` and `SendQueue::wants_progress`, and the last check.
        shared.arming.arm();
        let awaits = shared.queue.lock().is_ok_and(|awaited| *awaited != 0);
        if awaits {
            Attention::PROGRESS.add::<Loom>(&shared.attention);
        }
        Attention::fence::<Loom, O>();
        let sleeps = !awaits || shared.taken.load(Relaxed) == 0;
        assert!(poster.join().is_ok());
        if !peer.join().unwrap_or(false) {
            assert!(shared.carry_out(), "model: the record is lost");
        }
        let woken = shared.event.load(Relaxed) == 1;
        assert!(!sleeps || woken, "model: the poller sleeps, and its request is done");
    })
}

/// A thread of the process stores work, and wakes the poller if it sleeps. As `Core::fail`, `Core::notify`,
/// and `QueuePair::progress`, which leaves completions.
pub fn no_work_is_lost<O: Orders + 'static>() -> u64 {
    explore(|| {
        let arming = Arc::new(Arming::<Loom, O>::default());
        let work = Arc::new(LoomWord::new(0));
        let other = {
            let (arming, work) = (Arc::clone(&arming), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Relaxed);
                arming.wants_event()
            })
        };
        arming.arm();
        Attention::fence::<Loom, O>();
        let sleeps = work.load(Relaxed) == 0;
        let woken = other.join().unwrap_or(false);
        assert!(!sleeps || woken, "model: the poller sleeps, and there is work");
    })
}

/// The debt of an end, and what it shares with the peer.
#[derive(Debug)]
struct Owing<O> {
    arming: Arming<Loom, O>,
    debt: Debt<Loom, O>,
    /// The lock of the send queue, or of the target.
    queue: Mutex<()>,
    /// The peer's attention.
    attention: LoomWord,
    /// The progress that this end has made, and that it shows.
    made: LoomWord,
    shown: LoomWord,
    /// The peer's event.
    event: LoomWord,
}

impl<O: Orders> Owing<O> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            arming: Arming::default(),
            debt: Debt::default(),
            queue: Mutex::new(()),
            attention: LoomWord::new(0),
            made: LoomWord::new(0),
            shown: LoomWord::new(0),
            event: LoomWord::new(0),
        })
    }

    /// Stores news for the peer, and checks its attention without a fence. As `SendQueue::post` and
    /// `Target::post`, with `Core::announce_news`, `Core::report_taken` and `Core::owe`.
    fn store_news(&self, kind: u8) {
        let Ok(_queue) = self.queue.lock() else { panic!("model: a lock") };
        self.made.store(1, Release);
        let armed = self.arming.is_armed();
        let attention = Attention::of_own::<Loom>(&self.attention);
        if kind == Debt::<Loom, O>::NEWS {
            self.shown.store(1, Release);
        } else if armed || attention.wants(Attention::NEWS) {
            self.show();
        }
        if attention.wants(Attention::NEWS) {
            self.event.store(1, Relaxed);
        }
        if self.arming.is_armed() {
            self.check_attention(kind);
        } else {
            self.debt.add(kind);
        }
    }

    fn show(&self) {
        self.shown.raise(self.made.load(Acquire), Release);
    }

    /// As `Core::check_attention`.
    fn check_attention(&self, debt: u8) {
        if debt & Debt::<Loom, O>::PROGRESS != 0 {
            self.show();
        }
        if Attention::of_peer::<Loom, O>(&self.attention).wants(Attention::NEWS) {
            self.event.store(1, Relaxed);
        }
    }

    /// As `Core::owes` and `Core::settle`.
    fn settle(&self) {
        if self.debt.is_any() {
            self.check_attention(self.debt.take());
        }
    }

    /// As `Queue::arm` and `SoftPair::ask_for_events`.
    fn arm(&self) {
        self.arming.arm();
        drop(self.queue.lock());
        self.settle();
        Attention::fence::<Loom, O>();
    }

    /// Falls asleep, as the peer. Returns false if the peer finds news instead.
    fn sleep(&self) -> bool {
        Attention::NEWS.add::<Loom>(&self.attention);
        Attention::fence::<Loom, O>();
        self.shown.load(Acquire) == 0
    }
}

/// One thread stores news while another thread of its process polls (`polls`), then arms the queue and
/// sleeps, and the peer falls asleep. The peer is woken.
fn no_debt_is_lost<O: Orders + 'static>(polls: bool, kind: u8) -> u64 {
    explore(move || {
        let owing = Owing::<O>::new();
        let (poster, peer) = (Arc::clone(&owing), Arc::clone(&owing));
        let poster = thread::spawn(move || poster.store_news(kind));
        let peer = thread::spawn(move || peer.sleep());
        if polls {
            owing.settle();
        } else {
            owing.arm();
        }
        assert!(poster.join().is_ok());
        if polls {
            // The next poll.
            owing.settle();
        }
        let sleeps = peer.join().unwrap_or(false);
        assert!(!sleeps || owing.event.load(Relaxed) == 1, "model: the peer sleeps, and there is news");
    })
}

/// The debt of a thread that stores news is settled by the polls of another thread.
pub fn polls_settle_debts<O: Orders + 'static>() -> u64 {
    no_debt_is_lost::<O>(true, Debt::<Loom, O>::NEWS)
}

/// Progress that is shown later is shown by the polls of another thread.
pub fn polls_show_progress<O: Orders + 'static>() -> u64 {
    no_debt_is_lost::<O>(true, Debt::<Loom, O>::PROGRESS)
}

/// The debt of a thread that stores news is settled by a thread that arms the queue.
pub fn arming_settles_debts<O: Orders + 'static>() -> u64 {
    no_debt_is_lost::<O>(false, Debt::<Loom, O>::PROGRESS)
}

/// A guard ends while a record is published, or becomes less watchful. The record has a watchful guard. As
/// `Core::settle` and `Core::watch_records`.
pub fn no_record_is_unguarded<O: Orders + 'static>() -> u64 {
    let lowered = |to| {
        explore(move || {
            let guarded = Arc::new(Guarded::<Loom, O>::default());
            let asks = |guarded: &Guarded<Loom, O>| guarded.ask(Watch::Often);
            assert_eq!((asks(&guarded), asks(&guarded)), (Watch::Never, Watch::Often));
            let published = Arc::new(LoomWord::new(0));
            let poster = {
                let (guarded, published) = (Arc::clone(&guarded), Arc::clone(&published));
                thread::spawn(move || {
                    published.store(1, Relaxed);
                    let _ = Attention::of_peer::<Loom, O>(&LoomWord::new(0));
                    asks(&guarded)
                })
            };
            let stays_guarded = !guarded.lower(to, || published.load(Relaxed) == 1);
            let begins = poster.join().is_ok_and(|before| before == to);
            assert!(stays_guarded || begins, "model: the record has no guard");
            assert!(!(stays_guarded && begins), "model: the record has two guards");
            assert!(guarded.is(Watch::Often), "model: the guard of the record sleeps");
        })
    };
    lowered(Watch::Never) + lowered(Watch::Seldom)
}

/// Two threads publish records at one time. One of them lists the queue pair. As `Core::begin_to_guard`.
pub fn a_guard_begins_once<O: Orders + 'static>() -> u64 {
    explore(|| {
        let guarded = Arc::new(Guarded::<Loom, O>::default());
        let lists = |guarded: &Guarded<Loom, O>, watch| guarded.ask(watch) == Watch::Never;
        let other = Arc::clone(&guarded);
        let other = thread::spawn(move || lists(&other, Watch::Seldom));
        let listed = [lists(&guarded, Watch::Often), other.join().unwrap_or(false)];
        assert_ne!(listed[0], listed[1], "model: the queue pair is listed twice, or never");
    })
}
