//! The end of queue pairs and regions, while another thread of this process carries out records.

use super::*;

/// When a queue pair and a region are dropped, no thread of this process writes to the memory any more.
#[test]
fn memory_of_a_dropped_queue_pair_stays() {
    const LENGTH: usize = 4 << 20;
    for round in 0..100 {
        let (a, b) = Side::connected();
        let (from, to) = (a.large(LENGTH, 1), b.large(LENGTH, 0));
        let remote = RemoteSegment { address: to.memory().address(), rkey: to.rkey() };
        // SAFETY: no reference to the memory exists.
        let data = unsafe { [LocalSegment::new(&*from, 0..LENGTH)] };
        let connection = a.core.connection().unwrap();
        let offer = connection.peer.offer(&connection.address, from.memory()).unwrap();
        wait_for("the mapping", || offer.is_mapped());
        // The device's thread carries the WRITE out, because no thread of `b` polls.
        assert!(a.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None }));
        let memory = Arc::clone(to.memory());
        wait_for("the first bytes", || memory.load_u64(round % 16 * 60_000).unwrap() != 0);
        drop((b, to));
        memory.copy_in(0, &[0; LENGTH]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let mut bytes = vec![0; LENGTH];
        memory.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "round {round}");
    }
}

/// A thread of the parent holds the locks of a queue pair while another thread forks. The posts of the child
/// fail, and do not wait for the thread, which the child does not have.
#[test]
fn posts_of_a_child_take_no_lock() {
    const TIMEOUT: u32 = 60;
    let (a, _b) = Side::connected();
    let local: Arc<dyn Any + Send + Sync> = the_device().service.queue_pair(a.pair.number().0).unwrap();
    let pair = local.downcast::<SoftPair>().unwrap();
    let into = a.part(0, 8);
    let receive = [ReceiveRequest { wr_id: 1, into: &into }];
    let operation = Operation::Send { data: Payload::Registered(&into), immediate: None };
    let send = [SendRequest { wr_id: 2, operation, signaled: true }];
    let mut status = -1;
    let inside = Arc::new(std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| pair.visit_with_pause(&inside));
        inside.wait();
        // SAFETY: the child takes no lock of this process, and ends without destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: sets a timer of the child, whose signal ends it.
            unsafe { libc::alarm(TIMEOUT) };
            let fails = a.pair.post_receive(&receive).is_err() && a.pair.post_send(&send).is_err();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!fails)) };
        }
        // SAFETY: the status is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        inside.wait();
    });
    assert_eq!(status, 0, "the child has a signal, or a post that succeeds");
}
