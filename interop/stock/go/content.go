package main

import "encoding/binary"

// content returns the content of a checked payload (interop/proto/checked.proto).
func content(seed uint32, length int, period uint32) []byte {
	bytes := make([]byte, (length+3)/4*4)
	for word := 0; word*4 < length; word++ {
		k := uint32(word)
		if period != 0 {
			k %= period
		}
		binary.LittleEndian.PutUint32(bytes[word*4:], k*2654435761+seed)
	}
	return bytes[:length]
}

// firstMismatch returns the offset of the first wrong byte, plus one, or 0 if all bytes are right.
func firstMismatch(seed uint32, payload []byte, period uint32) uint64 {
	for at, expected := range content(seed, len(payload), period) {
		if payload[at] != expected {
			return uint64(at) + 1
		}
	}
	return 0
}
