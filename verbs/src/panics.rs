//! What outlives a panic: locks, and threads that run code of the application, such as wakers, drops of its
//! memory, and services.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// Locks `mutex`, also after a thread panicked while it held the lock. Callers therefore keep the guarded
/// data valid at every step.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs code of the application, which `what` names in the log. Returns `None` if it panicked: the panic ends
/// here, because the thread serves others, too.
#[inline]
pub fn run_foreign<T>(what: &str, code: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(code)) {
        Ok(result) => Some(result),
        Err(panic) => {
            note(what, panic);
            None
        }
    }
}

/// Hands each of `items` to code of the application. A panic there keeps none of the others back.
#[inline]
pub fn run_each<T>(what: &str, items: impl IntoIterator<Item = T>, mut code: impl FnMut(T)) {
    let mut items = items.into_iter();
    // Most lists of a poll are empty.
    if items.size_hint().1 == Some(0) {
        return;
    }
    // The iterator lives outside of what may panic: items that are dropped while another panics would end the
    // process.
    while run_foreign(what, || items.by_ref().for_each(&mut code)).is_none() {}
}

/// Wakes tasks. A waker may be the application's own.
#[inline]
pub fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    run_each("a waker", wakers, Waker::wake);
}

/// Drops memory of the application, whose owner may be its own.
#[inline]
pub fn drop_all<T>(memory: impl IntoIterator<Item = T>) {
    run_each("the owner of memory", memory, drop);
}

/// Notes a panic in the log.
#[cold]
fn note(what: &str, panic: Box<dyn Any + Send>) {
    // What subscribers do is code of the application, too.
    let logged = catch_unwind(AssertUnwindSafe(|| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text");
        crate::throttled!(
            warn,
            code = what,
            panic = text,
            "code of the application panicked on a thread that serves others"
        );
    }));
    for panic in logged.err().into_iter().chain([panic]) {
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            // It may panic forever.
            let _ = ManuallyDrop::new(again);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, reason = "tests")]

    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Panics when it is dropped, and panics with another one then.
    struct Bomb(usize);

    impl Drop for Bomb {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            if self.0 > 0 {
                std::panic::panic_any(Bomb(self.0 - 1));
            }
        }
    }

    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn a_panic_ends_where_the_code_of_the_application_ends() {
        assert_eq!(run_foreign("a test", || 5), Some(5));
        assert_eq!(run_foreign("a test", || panic!("as the test asked")), None::<()>);
        let mut seen = Vec::new();
        run_each("a test", 0..5_u32, |number| {
            seen.push(number);
            assert!(number.is_multiple_of(2), "{number}");
        });
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        drop_all([Bomb(1), Bomb(0), Bomb(5)]);
        // The payloads that are not forgotten.
        assert_eq!(DROPPED.load(Ordering::Relaxed), 3 + 2);
    }
}
