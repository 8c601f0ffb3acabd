//! Where and when calls begin.

use super::*;

/// Reads requests where the calls are found, as a server does.
#[derive(Debug, Default)]
struct Reading {
    depth: AtomicUsize,
    nested: AtomicUsize,
}

impl Accept for Reading {
    fn accept(&self, stream: Stream, _: RequestHeaders, _: bool) {
        let session = Arc::clone(&stream.session);
        if self.depth.fetch_add(1, Ordering::SeqCst) > 0 {
            self.nested.fetch_add(1, Ordering::SeqCst);
        }
        let later = session.drives_later();
        stream.deliver_landed(1 << 20);
        let _ = stream.poll_part(&mut Context::from_waker(Waker::noop()));
        drop(later);
        self.depth.fetch_sub(1, Ordering::SeqCst);
        stream.send_headers(HeaderMap::new());
        stream.end();
        session.drive();
    }
}

/// A call that is being polled reads its request. Other calls wait until it has been polled, and become no
/// tasks.
#[tokio::test]
async fn a_call_that_reads_its_request_lets_no_other_call_begin_within_it() {
    let acceptor = Arc::new(Reading::default());
    let pair = SessionPair::with(CallConfig::default(), CallConfig::default(), acceptor.clone()).await;
    for _ in 0..10 {
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let call = pair.open("/a.B/C");
                call.send_message(vec![noise(65_536)], 5, true);
                call
            })
            .collect();
        pair.client.drive();
        for call in &calls {
            response_head(call).await.unwrap();
        }
    }
    assert_eq!(acceptor.nested.load(Ordering::SeqCst), 0);
}

/// Notes whether calls begin on the thread of the test. The first call begins once the test lets it.
#[derive(Debug)]
struct Elsewhere {
    test: std::thread::ThreadId,
    begun: AtomicUsize,
    begun_in_test: AtomicUsize,
    lets: std::sync::Barrier,
}

impl Accept for Elsewhere {
    fn accept(&self, stream: Stream, _: RequestHeaders, _: bool) {
        let here = usize::from(std::thread::current().id() == self.test);
        self.begun_in_test.fetch_add(here, Ordering::SeqCst);
        if self.begun.fetch_add(1, Ordering::SeqCst) == 0 {
            self.lets.wait();
            self.lets.wait();
        }
        stream.send_headers(HeaderMap::new());
        stream.end();
        stream.session.drive();
    }
}

/// A task of the application sends on a connection whose next call has arrived, and has not begun: another
/// thread begins the call.
#[test]
fn no_call_begins_where_the_application_sends() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let acceptor = Arc::new(Elsewhere {
        test: std::thread::current().id(),
        begun: AtomicUsize::new(0),
        begun_in_test: AtomicUsize::new(0),
        lets: std::sync::Barrier::new(2),
    });
    let pair =
        runtime.block_on(SessionPair::with(CallConfig::default(), CallConfig::default(), acceptor.clone()));
    let calls = [(); 2].map(|()| pair.open("/a.B/C"));
    calls.iter().for_each(|call| call.send_data(Bytes::new(), true));
    pair.client.drive();
    acceptor.lets.wait();
    pair.server.drive();
    acceptor.lets.wait();
    for call in &calls {
        runtime.block_on(response_head(call)).unwrap();
    }
    assert_eq!(acceptor.begun_in_test.load(Ordering::SeqCst), 0);
}
