// Memory that stops whoever touches it, for tests that need a copy to be in flight for as long as they like.
#pragma once

#include <csignal>
#include <cstddef>

// One page without access rights: a thread that reads or writes it waits, in the signal handler, until open(). The page
// then holds what fill() wrote. One may be alive at a time. Declared after the device that copies it, so that a check
// that fails opens it before the device waits for its copies.
class HeldPage {
 public:
  static constexpr std::size_t kBytes = 4096;

  HeldPage();
  ~HeldPage();
  HeldPage(const HeldPage&) = delete;
  HeldPage& operator=(const HeldPage&) = delete;

  // Before anybody touches the page.
  void fill(std::byte value);

  void open();

  // Blocks until a thread waits for the page.
  void wait_until_touched() const;

  [[nodiscard]] std::byte* data() const;

 private:
  struct sigaction previous_ {};
};
