//! Locking without poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`. A poisoned mutex is locked all the same, because the state behind our locks is consistent whenever
/// one is released.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
